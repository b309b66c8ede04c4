"""Scores tokens from NumPy arrays: mean loss, perplexity, entropy, accuracy, the least likely tokens.

    python numpy_score.py                          a made-up head
    python numpy_score.py H.npy W.npy Y.npy        hidden states [n, d], weight [v, d], targets [n]

pip install logitless (NumPy comes with it). Files are mapped, not read: they may be larger than memory.
"""

import math
import sys

import numpy as np

import logitless


def main(files):
    if files:
        hidden, weight, targets = (np.load(name, mmap_mode="r") for name in files)
    else:
        r = np.random.default_rng(0)
        weight = r.standard_normal((32000, 64), dtype=np.float32) * 0.2
        targets = r.integers(0, 32000, 500)
        hidden = weight[targets] * 3 + r.standard_normal((500, 64), dtype=np.float32) * 0.5
        targets[:20] = -100  # ignored

    head = logitless.LinearCE()
    total, weakest = logitless.Sums(0.0, 0.0, 0.0, 0, 0), []
    entropy = correct = 0.0
    for start in range(0, len(hidden), 4096):  # results do not depend on how tokens are cut
        part = slice(start, start + 4096)
        out = head.forward(hidden[part], weight, targets[part], entropy=True, argmax=True)
        total = logitless.Sums(*(a + b for a, b in zip(total, out.sums)))
        entropy += float(out.entropy.astype(np.float64).sum())
        correct += int((out.argmax == targets[part]).sum())
        weakest += [(float(out.nll[i]), start + int(i)) for i in np.argsort(out.nll)[-3:]]

    loss = total.loss / max(total.n_valid, 1)
    print(f"tokens      {total.n_valid} scored, {total.n_ignored} ignored")
    print(f"loss        {loss:.6f}, perplexity {math.exp(loss):.3f}")
    print(f"entropy     {entropy / max(total.n_valid, 1):.6f} nats, accuracy {correct / max(total.n_valid, 1):.3f}")
    for nll, token in sorted(weakest, reverse=True)[:3]:
        print(f"log p       {-nll:.3f} of token {token}")


if __name__ == "__main__":
    main(sys.argv[1:])
