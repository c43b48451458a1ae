#!/bin/bash
# Builds docker/proxy.Dockerfile with buildah, then runs what it built: the image's own command in front of a simulator
# from the same image, and asks both. Needs root and buildah; where BASE_IMAGE is not set also debootstrap, which makes
# a base from Debian's packages, so that no image registry is needed. compose.yaml is checked where compose is installed.
#
#     docker/check.sh                                          # base made here, and kept in buildah's storage
#     BASE_IMAGE=python:3.13-slim-bookworm docker/check.sh     # base pulled
set -euo pipefail
cd "$(dirname "$0")/.."

export STORAGE_DRIVER=vfs BUILDAH_ISOLATION=chroot # these two work inside a container
own_base=localhost/logprob-sidecar-base:headers
image=localhost/logprob-sidecar:check
work=$(mktemp -d)
container=
groups=()

clean_up() {
    local status=$? group
    if [ "$status" != 0 ]; then cat "$work"/*.log >&2 2>/dev/null || true; fi
    for group in "${groups[@]}"; do kill -- "-$group" 2>/dev/null || true; done
    wait
    if [ -n "$container" ]; then buildah rm "$container" >/dev/null && buildah rmi "$image" >/dev/null; fi
    rm -rf "$work"
}
trap clean_up EXIT

make_base() {
    local base
    debootstrap --variant=minbase --include=ca-certificates,python3,python3-dev,python3-pip,python3-venv bookworm "$work/root"
    rm -rf "$work"/root/var/cache/apt/* "$work"/root/var/lib/apt/lists/* "$work"/root/dev/*
    base=$(buildah from scratch)
    buildah add --quiet "$base" "$work/root" /
    buildah commit --quiet --rm "$base" "$own_base"
    rm -rf "$work/root"
}

build() {
    local mounts=() path
    # pip inside the build trusts and asks what pip on this machine does; neither ends up in the image.
    for path in /etc/pip.conf /etc/ssl/certs; do
        if [ -e "$path" ]; then mounts+=(--volume "$path:$path:ro"); fi
    done
    buildah bud --format docker --network host "${mounts[@]}" --build-arg "BASE_IMAGE=$BASE_IMAGE" \
        --file docker/proxy.Dockerfile --tag "$image" .
}

in_image() { buildah run --network host "$container" -- "$@"; }

# Starts COMMAND… of the image in a process group of its own, with VARIABLES…: start VARIABLES… -- COMMAND…
start() {
    local variables=()
    while [ "$1" != -- ]; do
        variables+=(--env "$1")
        shift
    done
    shift
    setsid buildah run --network host "${variables[@]}" "$container" -- "$@" >"$work/${#groups[@]}.log" 2>&1 &
    groups+=($!)
}

free_port() { python3 -c 'import socket; s = socket.create_server(("127.0.0.1", 0)); print(s.getsockname()[1])'; }

# The list at the path of keys in the image's Docker configuration, one item a line.
configured() {
    buildah inspect --type image "$image" | python3 -c '
import json, sys
found = json.load(sys.stdin)["Docker"]["config"]
for key in sys.argv[1:]:
    found = found[key]
print("\n".join(found))' "$@"
}

wait_for() {
    local url=$1
    for _ in $(seq 150); do
        if python3 -c 'import sys, urllib.request; urllib.request.urlopen(sys.argv[1], timeout=2)' "$url" 2>/dev/null; then
            return
        fi
        sleep 0.2
    done
    echo "check: no answer from $url" >&2
    return 1
}

check_contents() {
    test "$(in_image id -u)" = 10001
    in_image python3 -c '
import importlib.util, shutil, sys
assert sys.prefix == "/opt/logprob-sidecar", sys.prefix
assert importlib.util.find_spec("torch") is None, "torch is in the image"
assert importlib.util.find_spec("pip") is None, "pip is in the environment of the image"
tools = [tool for tool in ("cc", "gcc", "make", "git") if shutil.which(tool)]
assert not tools, f"build tools in the image: {tools}"'
}

check_answers() {
    python3 - "$1" <<'PYTHON'
import json, sys, urllib.request

body = {"prompt": [10, 11, 12], "max_tokens": 64, "logprobs": 0, "seed": 1, "return_token_ids": True}
request = urllib.request.Request(
    f"{sys.argv[1]}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
)
with urllib.request.urlopen(request, timeout=30) as reply:
    assert reply.status == 200, reply.status
    choice = json.load(reply)["choices"][0]
    marks = reply.headers["X-Unscorable-Tokens"]
values, marked = choice["logprobs"]["token_logprobs"], choice["logprobs"]["unscorable"]
assert len(values) == len(choice["token_ids"]) > 0, choice
assert values.count(9999.0) == sum(map(len, marked.values())) == int(marks) > 0, (values, marked, marks)
print(f"check: {len(values)} tokens, {marks} of them unscorable and marked")
PYTHON
}

check_compose() {
    local compose expected=$1
    shift
    if docker compose version >/dev/null 2>&1; then
        compose=(docker compose)
    elif command -v docker-compose >/dev/null; then
        compose=(docker-compose)
    else
        echo "check: no compose here, compose.yaml is not checked"
        return
    fi
    "${compose[@]}" "$@" config --quiet
    # docker-compose, the first version, lists the services of all profiles.
    if [ "${compose[0]}" = docker ]; then
        test "$("${compose[@]}" "$@" config --services | sort | xargs)" = "$expected"
    fi
}

check_compose "sidecar vllm"
check_compose "sidecar sidecar-simulator simulator vllm" --profile simulator

if [ -z "${BASE_IMAGE:-}" ]; then
    if [ -z "$(buildah images --quiet "$own_base" 2>/dev/null)" ]; then make_base; fi
    BASE_IMAGE=$own_base
fi
build
container=$(buildah from "$image")
check_contents

upstream=http://127.0.0.1:$(free_port)
start -- logprob-sidecar simulate --port "${upstream##*:}" --nan-rate 0.2
wait_for "$upstream/health"

port=$(free_port)
mapfile -t command < <(configured Entrypoint && configured Cmd)
start "SIDECAR_UPSTREAM=$upstream" "SIDECAR_PORT=$port" -- "${command[@]}"
wait_for "http://127.0.0.1:$port/livez"
check_answers "http://127.0.0.1:$port"

mapfile -t health < <(configured Healthcheck Test | tail -n +2)
buildah run --network host --env "SIDECAR_PORT=$port" "$container" -- "${health[@]}"
echo "check: the image was built, and its command answers"
