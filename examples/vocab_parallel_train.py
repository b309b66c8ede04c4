"""Trains a tiny language model whose head is cut over the processes of a torch.distributed group.

    torchrun --nproc-per-node 2 vocab_parallel_train.py

Every rank has the whole body, its own rows of the head (shards of different sizes, to show that they may be) and the
same batch. The loss has the same bits on every rank and for any number of ranks; the body's gradients come out summed,
so no all-reduce of them follows; the head's are the shard's.
"""

import torch
import torch.distributed as dist

from logitless.torch import linear_cross_entropy

VOCAB, HIDDEN, BATCH, LENGTH = 5000, 48, 8, 16


def main():
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)  # the same body, head and batches on every rank

    bounds = [VOCAB * r * (r + 1) // (size * (size + 1)) for r in range(size + 1)]
    first, end = bounds[rank], bounds[rank + 1]
    whole = torch.randn(VOCAB, HIDDEN) * 0.1
    head = torch.nn.Parameter(whole[first:end].clone())
    embedding = torch.nn.Embedding(VOCAB, HIDDEN)
    body = torch.nn.GRU(HIDDEN, HIDDEN, batch_first=True)
    optimizer = torch.optim.Adam([head, *embedding.parameters(), *body.parameters()], lr=1e-2)

    for step in range(31):
        start = torch.randint(0, VOCAB // 4, (BATCH, 1))
        ids = (start + 3 * torch.arange(LENGTH + 1)) % (VOCAB // 4)  # a language in which every word is 3 more
        hidden = body(embedding(ids[:, :-1]))[0]
        loss = linear_cross_entropy(
            hidden, head, ids[:, 1:], group=dist.group.WORLD, vocab_start=first, vocab_size=VOCAB
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0 and step % 10 == 0:
            print(f"step {step:3d}  loss {loss.item():.4f}  (rank 0 holds words {first} to {end - 1} of {VOCAB})")

    mine, last = loss.detach(), [torch.empty_like(loss) for _ in range(size)]
    dist.all_gather(last, mine)
    assert all(torch.equal(other, loss) for other in last)
    if rank == 0:
        print(f"the last loss has the same bits on all {size} ranks: {loss.item().hex()}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
