"""A GRPO loop on a tiny policy: sample a group of completions, score them, take clipped policy-gradient steps.

    python grpo_step.py

The trainer's log-probs, their ratio to the sampler's and the entropy bonus come from one call (linear_logp), whose
memory does not grow with tokens x vocabulary. From equal hidden states sampler and trainer get equal bits, although one
asks about 16 tokens at a time and the other about 192: the first ratio is 1.

The task: words of a vocabulary of 1000 are rewarded if they are multiples of 7.
"""

import torch

from logitless.torch import linear_logp

VOCAB, HIDDEN, GROUP, LENGTH, TEMPERATURE, CLIP = 1000, 64, 16, 12, 1.0, 0.2


class Policy(torch.nn.Module):
    """A language model that looks one word back; `head` is the weight that the library multiplies by."""

    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(VOCAB, HIDDEN)
        self.body = torch.nn.Sequential(torch.nn.Linear(HIDDEN, HIDDEN), torch.nn.Tanh())
        self.head = torch.nn.Parameter(torch.randn(VOCAB, HIDDEN) * 0.05)

    def forward(self, ids):
        return self.body(self.embedding(ids))


@torch.no_grad()
def sample(policy):
    """[GROUP, LENGTH + 1] words, the first one 0, and the log-probs of the sampled ones, one position at a time."""
    ids, logps = torch.zeros(GROUP, 1, dtype=torch.int64), []
    for _ in range(LENGTH):
        hidden = policy(ids[:, -1])
        word = torch.multinomial(torch.softmax(hidden @ policy.head.T / TEMPERATURE, -1), 1)
        logps.append(linear_logp(hidden, policy.head, word[:, 0], temperature=TEMPERATURE).logp)
        ids = torch.cat((ids, word), 1)
    return ids, torch.stack(logps, 1)


def main():
    torch.manual_seed(0)
    policy = Policy()
    optimizer = torch.optim.Adam(policy.parameters(), lr=2e-2)
    for step in range(41):
        ids, old_logp = sample(policy)
        reward = (ids[:, 1:] % 7 == 0).float().mean(1)
        advantage = (reward - reward.mean()) / (reward.std() + 1e-4)

        for inner in range(2):
            logp, entropy = linear_logp(
                policy(ids[:, :-1]), policy.head, ids[:, 1:], temperature=TEMPERATURE, entropy=True
            )
            ratio = torch.exp(logp - old_logp)
            if step == inner == 0:
                print(f"first ratios between {ratio.min().item():.7f} and {ratio.max().item():.7f}")
            clipped = torch.clamp(ratio, 1 - CLIP, 1 + CLIP)
            gain = torch.minimum(ratio * advantage[:, None], clipped * advantage[:, None])
            loss = -(gain + 1e-3 * entropy).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if step % 20 == 0:
            print(f"step {step:3d}  reward {reward.mean().item():.3f}  entropy {entropy.mean().item():.3f}")


if __name__ == "__main__":
    main()
