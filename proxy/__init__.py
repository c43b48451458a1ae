"""HTTP sidecar between a rollout worker and vLLM: marks unscorable logprobs, recovers replies vLLM could not write."""
