"""The trainer section of README does what it says: its examples run as they stand there."""

import re
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

README = (Path(__file__).parents[1] / "README.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```", README, re.DOTALL | re.MULTILINE)


def block(words: str) -> str:
    found = [text for text in BLOCKS if words in text]
    assert len(found) == 1, words
    return found[0]


class Policy(nn.Module):
    """One logit per vocabulary entry, whatever came before."""

    def __init__(self) -> None:
        super().__init__()
        self.logits = nn.Parameter(torch.zeros(4))

    def forward(self, batch: dict[str, Any]) -> Any:
        return self.logits.log_softmax(-1)[batch["token_ids"]]


def test_plain_loop() -> None:
    torch.manual_seed(0)
    model = Policy()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    batch = {
        "token_ids": torch.tensor([[1, 1, 1], [2, 2, 0]]),
        "token_logprobs": [[-1.4, None, 9999.0], [-1.4, "NaN"]],
        "lengths": [3, 2],
        "advantages": torch.tensor([1.0, -1.0]),
        "mask": torch.tensor([[1, 1, 1], [1, 1, 0]]),
    }
    scope: dict[str, Any] = {"model": model, "optimizer": optimizer, "batches": [batch]}
    exec(block("guard.observe(loss)"), scope)
    assert scope["guard"].counts.steps == 1
    assert scope["metrics"]["unscorable_fraction"].item() == pytest.approx(3 / 5)
    probabilities = model.logits.softmax(-1)
    assert probabilities[1] > 0.25 > probabilities[2]


def test_in_the_manner_of_verl() -> None:
    scope: dict[str, Any] = {}
    exec(block("def nan_safe_policy_loss"), scope)
    new = torch.full((1, 2), -1.0, requires_grad=True)
    loss, metrics = scope["nan_safe_policy_loss"](
        old_log_prob=torch.tensor([[-1.0, torch.nan]]),
        log_prob=new,
        advantages=torch.ones(1, 2),
        response_mask=torch.ones(1, 2),
        loss_agg_mode="token-mean",
    )
    loss.backward()
    assert new.grad is not None and new.grad.tolist() == [[-0.5, 0.0]]
    assert metrics["actor/unscorable_fraction"].item() == 0.5
