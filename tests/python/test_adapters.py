"""The frameworks' contracts on one rank (group_worker.py has those of several), and against the real packages where installed."""
import ast
import importlib.util
import inspect
from pathlib import Path

import pytest
import torch
from conftest import Problem, reference, relative

from logitless.adapters import deepspeed, megatron, trl, verl


def parameters_of(package, file, function, owner=None):
    """Parameter names of a function in an installed package, read without importing it (most need a GPU's libraries)."""
    try:
        spec = importlib.util.find_spec(package)
    except ModuleNotFoundError:
        spec = None
    path = Path(next(iter(spec.submodule_search_locations))) / file if spec else None
    if path is None or not path.exists():
        pytest.skip(f"{package} is not installed, or has no {file}")
    body = ast.parse(path.read_text()).body
    if owner:
        body = next(node for node in body if isinstance(node, ast.ClassDef) and node.name == owner).body
    found = next(node for node in body if isinstance(node, ast.FunctionDef) and node.name == function)
    return [a.arg for a in found.args.args if a.arg != "ctx"]


@pytest.mark.parametrize("ours, package, file, function, owner", [
    (verl.linear_cross_entropy, "verl", "utils/kernel/linear_cross_entropy.py", "forward", "LinearCrossEntropy"),
    (trl.chunked_logprob, "trl", "kernels/chunked_logprob.py", "forward", "ChunkedLogProbFunction"),
    (deepspeed.vocab_parallel_linear_cross_entropy, "deepspeed", "sequence/linear_cross_entropy.py",
     "vocab_parallel_linear_cross_entropy", None),
], ids=["verl", "trl", "deepspeed"])
def test_signatures_are_theirs(ours, package, file, function, owner):
    theirs = parameters_of(package, file, function, owner)
    mine = [p.name for p in inspect.signature(ours).parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert mine == theirs


def test_megatrons_signature():
    """As in its development branch; no release has the file yet."""
    names = list(inspect.signature(megatron.linear_cross_entropy).parameters)
    assert names[:7] == ["hidden", "weight", "labels", "tp_group", "reduction", "ignore_index", "sequence_parallel"]


def test_megatron(device):
    p = Problem("f32:n24:d16:v60:ign", device)
    hidden, labels = p.x.view(6, 4, 16), p.target.view(6, 4)
    x, w, _ = p.double()
    for reduction, shape in (("none", (24,)), ("mean", ()), ("sum", ())):
        loss = megatron.linear_cross_entropy(hidden, p.w, labels, None, reduction)
        want = reference(x, w, None, p.target, reduction=reduction)[0]
        assert loss.shape == shape and relative(loss, want) < 1e-6
    main = torch.zeros(60, 16, device=device)
    megatron.linear_cross_entropy(hidden, p.w, labels, main_grad=main).backward()
    reference(x, w, None, p.target)[0].backward()
    assert relative(main, w.grad) < 1e-5 and relative(p.x.grad, x.grad) < 1e-5 and p.w.grad is None


@pytest.mark.parametrize("reduction", ["none", "sum", "mean", "MEAN"])
def test_verl(reduction, device):
    p = Problem("f32:n24:d16:v60", device)
    p.target[0] = 0  # no label is special
    logp, entropy = verl.linear_cross_entropy(p.x.view(2, 12, 16), p.w, p.target.view(2, 12), 0.7, reduction)
    x, w, _ = p.double()
    nll, _, want = reference(x, w, None, p.target, temperature=0.7, reduction="none")
    wanted = {"none": -nll, "sum": -nll.sum(), "mean": -nll.mean()}[reduction.lower()]
    assert logp.shape == wanted.shape and relative(logp, wanted) < 1e-6 and relative(entropy, want) < 1e-5
    (logp.sum() * 2 - entropy.square().sum()).backward()
    (wanted.sum() * 2 - want.square().sum()).backward()
    assert relative(p.x.grad, x.grad) < 1e-5 and relative(p.w.grad, w.grad) < 1e-5
    with pytest.raises(ValueError, match="avg"):
        verl.linear_cross_entropy(p.x, p.w, p.target, 1.0, "avg")


@pytest.mark.parametrize("scale, softcap", [(1.0, None), (0.25, None), (0.25, 3.0), (-0.5, None)])
def test_trl(scale, softcap, device):
    p = Problem("f32:n24:d16:v60:bias", device)
    logp, entropy, none, also_none, top1 = trl.chunked_logprob(p.x, p.w, p.bias, p.target, 0.8, 8192, softcap, scale)
    x, w, b = p.double()
    z = (x @ w.T + b) * scale
    z = (softcap * torch.tanh(z / softcap) if softcap else z) / 0.8
    want = torch.log_softmax(z, -1).gather(-1, p.target[:, None])[:, 0]
    wanted_entropy = -(torch.softmax(z, -1) * torch.log_softmax(z, -1)).sum(-1)
    assert relative(logp, want) < 1e-6 and relative(entropy, wanted_entropy) < 1e-5 and none is None is also_none
    assert torch.equal(top1, z.argmax(-1) == p.target)
    (logp.sum() + entropy.square().sum()).backward()
    (want.sum() + wanted_entropy.square().sum()).backward()
    for mine, theirs in zip(p.leaves(), (x, w, b)):
        assert relative(mine.grad, theirs.grad) < 1e-5
    with pytest.raises(ValueError, match="mean_logits"):
        trl.chunked_logprob(p.x, p.w, p.bias, p.target, 1.0, outputs=("mean_logits",))


def test_trl_trainers_use_it():
    """TRL's own patched model, before and after: the same log-probs, entropy, loss and gradients."""
    utils = pytest.importorskip("trl.trainer.utils", reason="TRL is not installed")
    transformers = pytest.importorskip("transformers")
    if not hasattr(utils, "_ChunkedLogProbFunction"):
        pytest.skip("this TRL has no fused head")
    config = transformers.LlamaConfig(vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=1,
                                      num_attention_heads=4)
    model = transformers.LlamaForCausalLM(config)
    utils.add_fused_lm_head(model, temperature=0.9, outputs=("log_probs", "entropy", "is_top1"))
    ids = torch.randint(3, 97, (2, 12))
    labels = ids.clone()
    labels[:, :4] = -100
    found = []
    before = utils._ChunkedLogProbFunction
    for use in (lambda: None, trl.use_in_trl):
        use()
        model.zero_grad()
        out = model(input_ids=ids, labels=labels, fused_lm_head=True)
        (out.loss - 0.01 * out.entropy.sum()).backward()
        found.append([out.loss, out.log_probs, out.entropy, out.is_top1.float(), *(p.grad.clone() for p in model.parameters())])
    utils._ChunkedLogProbFunction = before
    for theirs, ours in zip(*found):
        assert relative(ours, theirs) < 1e-5


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
def test_deepspeed_one_rank(reduction, device):
    p = Problem("f32:n24:d16:v60:bias:ign", device)
    hidden, target = p.x.view(2, 12, 16), p.target.view(2, 12)
    loss = deepspeed.vocab_parallel_linear_cross_entropy(hidden, p.w, target, p.bias, reduction=reduction, chunk_size=7)
    x, w, b = p.double()
    want = reference(x, w, b, p.target, reduction=reduction)[0]
    assert relative(loss.flatten(), want.flatten()) < 1e-6 and loss.shape == ((2, 12) if reduction == "none" else ())
    loss.sum().backward()
    want.sum().backward()
    for mine, theirs in zip(p.leaves(), (x, w, b)):
        assert relative(mine.grad, theirs.grad) < 1e-5


def test_deepspeed_refusals_and_nothing_valid(device):
    p = Problem("f32:n6:d16:v60", device)
    call = deepspeed.vocab_parallel_linear_cross_entropy
    for more, sentence in (({"reduction": "avg"}, "avg"), ({"vocab_start_index": 0}, "together"), ({"chunk_size": 0}, "chunk_size"),
                           ({"vocab_start_index": 0, "vocab_end_index": 59}, "does not hold 60 rows"),
                           ({"vocab_start_index": 1, "vocab_end_index": 61}, "shard|v_begin|v_local")):
        with pytest.raises(ValueError, match=sentence):
            call(p.x, p.w, p.target, **more)
    loss = call(p.x, p.w, torch.full_like(p.target, -100))
    loss.backward()
    assert loss.item() == 0 and (p.x.grad == 0).all()


def test_deepspeeds_own_function_agrees():
    theirs = pytest.importorskip("deepspeed.sequence.linear_cross_entropy", reason="DeepSpeed is not installed, or older")
    p = Problem("f32:n24:d16:v60:bias:ign", "cpu")
    for reduction in ("none", "sum", "mean"):
        for call in (theirs.vocab_parallel_linear_cross_entropy, deepspeed.vocab_parallel_linear_cross_entropy):
            for t in p.leaves():
                t.grad = None
            loss = call(p.x, p.w, p.target, p.bias, reduction=reduction)
            loss.sum().backward()
            found = [loss, *(t.grad.clone() for t in p.leaves())]
            if call is theirs.vocab_parallel_linear_cross_entropy:
                wanted = found
        for mine, want in zip(found, wanted):
            assert relative(mine, want) < 1e-5
