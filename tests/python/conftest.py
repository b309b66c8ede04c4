"""What the Python tests share: devices, problems as strings, and the float64 reference.

A problem is a string such as `bf16:n33:d64:v257:bias:cap5:ls0.1`; a failure prints it, and `-k` reruns it.
"""

from __future__ import annotations

import re

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

DEVICES = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
# Largest relative error (Frobenius) of a gradient against float64 on the same inputs: f32 sums; one rounding of the
# result, and on a GPU one of dz (docs/cuda.md, 4).
GRAD_BOUND = {torch.float32: 3e-6, torch.bfloat16: 4e-3, torch.float16: 8e-4}
LSE_BOUND = 5e-7  # relative to 1 + |lse|, for logits in f32; their own error comes on top


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param


@pytest.fixture(autouse=True)
def _repeatable():
    torch.manual_seed(0)
    yield


class Problem:
    """Operands and options of a problem string. x, w, bias are leaves that require a gradient."""

    def __init__(self, text, device):
        fields = text.split(":")
        number = {m[1]: float(m[2]) for f in fields if (m := re.fullmatch(r"([a-z]+)(\d[\d.]*)", f))}
        n, d, v = (int(number[k]) for k in "ndv")
        generator = torch.Generator().manual_seed(n * 31 + d * 7 + v)

        def normal(*shape):
            return torch.randn(*shape, generator=generator)

        self.text, self.device, self.n, self.v = text, device, n, v
        self.dtype = DTYPES[fields[0]]
        leaf = lambda t: t.to(device=device, dtype=self.dtype).requires_grad_()  # noqa: E731
        self.x, self.w = leaf(normal(n, d)), leaf(normal(v, d) * (4 / d**0.5))
        self.bias = leaf(normal(v)) if "bias" in fields else None
        self.target = torch.randint(0, v, (n,), generator=generator).to(device)
        if "ign" in fields:
            self.target[::3] = -100
        options = {
            "temperature": number.get("t", 1.0),
            "softcap": number.get("cap", 0.0),
            "label_smoothing": number.get("ls", 0.0),
            "z_loss": number.get("zl", 0.0),
            "smoothing_rule": "others" if "others" in fields else "all",
            "reduction": next((r for r in ("sum", "none") if r in fields), "mean"),
            "token_scaling": "scaled" in fields,
        }
        if "cw" in fields:
            options["class_weight"] = torch.rand(v, generator=generator).to(device)
        if "tw" in fields:
            options["token_weight"] = torch.rand(n, generator=generator).to(device)
        if "norm" in number:
            options["normalizer"] = number["norm"]
        self.options = options

    def leaves(self):
        return [t for t in (self.x, self.w, self.bias) if t is not None]

    def double(self):
        """The same operands in float64, leaves of their own."""
        return [None if t is None else t.detach().double().requires_grad_() for t in (self.x, self.w, self.bias)]


def reference(
    x,
    w,
    bias,
    target,
    *,
    temperature=1.0,
    softcap=0.0,
    label_smoothing=0.0,
    z_loss=0.0,
    smoothing_rule="all",
    reduction="mean",
    token_scaling=False,
    class_weight=None,
    token_weight=None,
    normalizer=None,
    ignore_index=-100,
):
    """loss, lse, entropy by the formulas of logitless.h, in the dtype of x (float64), differentiable."""
    valid = target != ignore_index
    z = x @ w.T
    if bias is not None:
        z = z + bias
    if softcap:
        z = softcap * torch.tanh(z / softcap)
    z = (z / temperature)[valid]
    y, v = target[valid].long(), w.shape[0]
    cw = torch.ones(v, dtype=z.dtype, device=z.device) if class_weight is None else class_weight.to(z.dtype)
    lse = torch.logsumexp(z, -1)
    p = torch.softmax(z, -1)
    entropy = lse - (p * z).sum(-1)
    nll = lse - z.gather(-1, y[:, None])[:, 0]
    spread = cw[None, :] * (lse[:, None] - z)
    if smoothing_rule == "all":
        rest = spread.sum(-1) / v
    else:
        rest = (spread.sum(-1) - cw[y] * nll) / (v - 1)
    a = label_smoothing
    each = (1 - a) * cw[y] * nll + (a * rest if a else 0) + z_loss * lse**2
    if token_weight is not None:
        each = each * token_weight.to(z.dtype)[valid]
    if token_scaling:
        each = each * torch.exp(-nll).detach()

    def whole(rows):
        return torch.zeros(target.shape, dtype=rows.dtype, device=rows.device).masked_scatter(valid, rows)

    loss = whole(each)
    if reduction == "sum":
        loss = loss.sum()
    elif reduction == "mean":
        loss = loss.sum() / (normalizer if normalizer is not None else max(cw[y].sum(), 1e-300) if valid.any() else 1)
    return loss, whole(lse), whole(entropy)


def relative(found, wanted):
    """Frobenius error of `found` relative to `wanted`; an exact zero must be found exactly."""
    found, wanted = found.detach().double(), wanted.detach().double()
    size = wanted.norm()
    return (found - wanted).norm() / size if size else found.norm()
