"""From the sidecar's bytes to the loss: the two packages share no code, only what goes over the wire."""

import json
from typing import Any, cast

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor  # noqa: E402

import proxy.unscorable  # noqa: E402
from proxy.api import Api, Asked  # noqa: E402
from proxy.rewrite import StreamRewriter, rewrite_reply  # noqa: E402
from proxy.unscorable import Encoding, Rules  # noqa: E402
from trainer_hooks import PolicyLossConfig, decode_logprobs, masking, pad_logprobs, policy_loss  # noqa: E402

RAW = b"[-0.5,null,-9999.0,-0.7,1e999,0.25]"
BAD = [1, 2, 4, 5]
NEW = torch.tensor([[-0.4, -1.0, -2.0, -0.9, -0.3, -0.2]])
ADVANTAGE = torch.tensor([1.5])

COMPLETION = b'{"choices":[{"index":0,"token_ids":[1,2,3,4,5,6],"logprobs":{"token_logprobs":%b}}]}' % RAW
ENTRIES = b",".join(b'{"token":"a","logprob":%b,"top_logprobs":[]}' % number for number in RAW[1:-1].split(b","))
CHAT = b'{"choices":[{"index":0,"logprobs":{"content":[%b]}}]}' % ENTRIES
GENERATE = b'{"choices":[{"index":0,"token_ids":[1,2,3,4,5,6],"logprobs":{"content":[%b]}}]}' % ENTRIES


def completions(reply: Any) -> list[Any]:
    return cast(list[Any], reply["choices"][0]["logprobs"]["token_logprobs"])


def chat(reply: Any) -> list[Any]:
    return [entry["logprob"] for entry in reply["choices"][0]["logprobs"]["content"]]


ROUTES = [
    pytest.param(Api.COMPLETIONS, COMPLETION, completions, id="completions"),
    pytest.param(Api.CHAT, CHAT, chat, id="chat"),
    pytest.param(Api.GENERATE, GENERATE, chat, id="generate"),
]
ENCODINGS = list(Encoding)


def through_sidecar(api: Api, body: bytes, encoding: Encoding) -> Any:
    out, findings = rewrite_reply(body, api, Rules(encoding), lambda: Asked(api, logprobs=True))
    assert findings.sampled == 6
    return json.loads(out)


def trained(old: Tensor, unscorable: str) -> tuple[Tensor, Tensor, Tensor]:
    new = NEW.clone().requires_grad_()
    config = PolicyLossConfig(unscorable=cast(Any, unscorable))
    output = policy_loss(new, old, ADVANTAGE, torch.ones(1, 6), config)
    output.loss.backward()
    assert new.grad is not None
    return output.loss.detach(), new.grad, output.metrics["unscorable_fraction"]


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize(("api", "body", "read"), ROUTES)
def test_every_encoding_decodes_to_nan_where_the_sidecar_says_so(
    api: Api, body: bytes, read: Any, encoding: Encoding
) -> None:
    reply = through_sidecar(api, body, encoding)
    decoded = decode_logprobs(read(reply), length=6)
    marked = reply["choices"][0]["logprobs"]["unscorable"]
    assert decoded.isnan().nonzero().flatten().tolist() == sorted(sum(marked.values(), [])) == BAD
    assert decoded[[0, 3]].tolist() == torch.tensor([-0.5, -0.7]).tolist()


@pytest.mark.parametrize("unscorable", ["on_policy", "drop"])
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_the_loss_of_every_encoding_is_the_same_to_the_bit(encoding: Encoding, unscorable: str) -> None:
    expected = trained(torch.tensor([[-0.5, torch.nan, torch.nan, -0.7, torch.nan, torch.nan]]), unscorable)
    old = pad_logprobs([completions(through_sidecar(Api.COMPLETIONS, COMPLETION, encoding))])
    for got, wanted in zip(trained(old, unscorable), expected, strict=True):
        assert torch.equal(got, wanted)
    assert expected[2].item() == pytest.approx(4 / 6)
    # ratio 1 for an unscorable token under on_policy, nothing under drop
    lost = -1.5 / 6 if unscorable == "on_policy" else 0.0
    assert expected[1][0, BAD].tolist() == pytest.approx([lost] * 4)


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_a_stream_decodes_to_the_same(encoding: Encoding) -> None:
    rewriter = StreamRewriter(Asked(Api.COMPLETIONS, logprobs=True, stream=True), Rules(encoding))
    events = [
        b'data: {"choices":[{"index":0,"token_ids":[%d],"logprobs":{"token_logprobs":[%b]}}]}\n\n' % (i, number)
        for i, number in enumerate(RAW[1:-1].split(b","))
    ]
    out = rewriter.feed(b"".join([*events, b"data: [DONE]\n\n"])) + rewriter.close()
    replies = [json.loads(line[6:]) for line in out.splitlines() if line.startswith(b"data: {")]
    values = [value for reply in replies for value in completions(reply)]
    assert decode_logprobs(values).isnan().nonzero().flatten().tolist() == BAD


def test_a_trainer_without_the_hook_gives_the_ceiling_no_gradient() -> None:
    old = torch.tensor([completions(through_sidecar(Api.COMPLETIONS, COMPLETION, Encoding.CEILING))])
    ratio = torch.exp(NEW - old)
    assert ratio[0, BAD].tolist() == [0.0] * 4


def test_both_sides_draw_the_lines_at_the_same_numbers() -> None:
    assert (masking.FLOOR, masking.POSITIVE_TOLERANCE) == (proxy.unscorable.FLOOR, proxy.unscorable.TOLERANCE)
