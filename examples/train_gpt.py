"""Trains a small character-level GPT, sharded over the ranks that it is started on, on Python's own standard library.

Two processes of this machine, everything set up first::

    scripts/train

or by hand, on any number of processes, one without the launcher included::

    python -m paddle.distributed.launch --nproc_per_node 2 --backend gloo examples/train_gpt.py --steps 100
    python examples/train_gpt.py

With ``--checkpoints runs/gpt`` it saves now and then, while it goes on, and a second start resumes from the last one
that is complete, on as many processes as there are then.

What hp_sharding asks of a training script is all in ``prepare``. At the end come the loss on text that was held out,
before and after, some text that the model wrote, and where the time and the memory went.
"""

from __future__ import annotations

import argparse
import math
import sysconfig
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import paddle
import paddle.nn.functional as F
from tqdm import tqdm

import hp_sharding
from hp_sharding import fleet  # was: from paddle.distributed import fleet

ALPHABET = "\n" + "".join(map(chr, range(32, 127)))
CORPUS_BYTES = 2_000_000
HELD_OUT_EVERY = 10
PROMPT = "import os\n\n\ndef "
_CODE_OF_CHAR = {char: code for code, char in enumerate(ALPHABET)}


class Shape(NamedTuple):
    """Sizes of the model."""

    layers: int
    width: int
    heads: int
    context: int


class Block(paddle.nn.Layer):
    """Causal self-attention and a two-layer perceptron, each after a layer norm and around a shortcut."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        # Outputs that are added to the shortcut start smaller, so that depth does not enlarge the sum.
        into_shortcut = _normal(0.02 / math.sqrt(2 * shape.layers))
        self.norm1 = paddle.nn.LayerNorm(shape.width)
        self.qkv = paddle.nn.Linear(shape.width, 3 * shape.width, weight_attr=_normal(0.02))
        self.out = paddle.nn.Linear(shape.width, shape.width, weight_attr=into_shortcut)
        self.norm2 = paddle.nn.LayerNorm(shape.width)
        self.up = paddle.nn.Linear(shape.width, 4 * shape.width, weight_attr=_normal(0.02))
        self.down = paddle.nn.Linear(4 * shape.width, shape.width, weight_attr=into_shortcut)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        """Maps float32 [batch, time, width] to the same shape."""
        x = x + self._attend(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate=True))

    def _attend(self, x: paddle.Tensor) -> paddle.Tensor:
        batch, length, width = x.shape
        query, key, value = (
            part.reshape([batch, length, self.heads, width // self.heads]).transpose([0, 2, 1, 3])
            for part in self.qkv(x).chunk(3, axis=-1)
        )
        scores = paddle.matmul(query, key, transpose_y=True) * (width // self.heads) ** -0.5
        future = paddle.triu(paddle.full([length, length], -1e9), 1)
        mixed = paddle.matmul(F.softmax(scores + future), value)
        return self.out(mixed.transpose([0, 2, 1, 3]).reshape([batch, length, width]))


class GPT(paddle.nn.Layer):
    """A decoder over ``ALPHABET``; the output layer is the token embedding, used a second time."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.tokens = paddle.nn.Embedding(len(ALPHABET), shape.width, weight_attr=_normal(0.02))
        self.positions = paddle.nn.Embedding(shape.context, shape.width, weight_attr=_normal(0.02))
        self.blocks = paddle.nn.LayerList([Block(shape) for _ in range(shape.layers)])
        self.norm = paddle.nn.LayerNorm(shape.width)

    def forward(self, codes: paddle.Tensor) -> paddle.Tensor:
        """Maps int64 codes [batch, time] to float32 logits [batch, time, len(ALPHABET)] of the next character."""
        x = self.tokens(codes) + self.positions(paddle.arange(codes.shape[1]))
        for block in self.blocks:
            x = block(x)
        return paddle.matmul(self.norm(x), self.tokens.weight, transpose_y=True)


def _normal(std: float) -> paddle.ParamAttr:
    return paddle.ParamAttr(initializer=paddle.nn.initializer.Normal(0.0, std))


class Corpus(NamedTuple):
    """Codes of all characters, int64 [n]: what is trained on, and what is kept for the test."""

    train: np.ndarray
    held_out: np.ndarray


def read_corpus() -> Corpus:
    """Reads the running interpreter's standard library in order of path, up to ``CORPUS_BYTES``; holds out files."""
    root = Path(sysconfig.get_paths()["stdlib"])
    texts: list[str] = []
    missing = CORPUS_BYTES
    for path in sorted(root.rglob("*.py")):
        if missing <= 0:
            break
        if {"site-packages", "test", "tests", "encodings"}.isdisjoint(path.relative_to(root).parts):
            texts.append(path.read_text(encoding="utf-8", errors="ignore")[:missing])
            missing -= len(texts[-1])
    held_out = texts[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY]
    del texts[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY]
    return Corpus(_encode("".join(texts)), _encode("".join(held_out)))


def _encode(text: str) -> np.ndarray:
    return np.array([_CODE_OF_CHAR[char] for char in text if char in _CODE_OF_CHAR], dtype=np.int64)


def draw_batch(codes: np.ndarray, size: int, context: int, random: np.random.Generator) -> paddle.Tensor:
    """Returns int64 [size, context + 1]: stretches of the text, each with the character that follows."""
    starts = random.integers(0, len(codes) - context, size)
    return paddle.to_tensor(codes[starts[:, None] + np.arange(context + 1)])


def loss_of(model: paddle.nn.Layer, batch: paddle.Tensor) -> paddle.Tensor:
    """Mean cross-entropy of the next character, in nats, float32 []."""
    logits = model(batch[:, :-1])
    return F.cross_entropy(logits.reshape([-1, len(ALPHABET)]), batch[:, 1:].reshape([-1]))


@paddle.no_grad()
def held_out_loss(model: paddle.nn.Layer, corpus: Corpus, args: argparse.Namespace) -> float:
    """Mean loss over the same eight batches of held-out text whenever it is called, on every rank."""
    random = np.random.default_rng(args.seed)
    batches = [draw_batch(corpus.held_out, args.batch, args.context, random) for _ in range(8)]
    return float(np.mean([float(loss_of(model, batch)) for batch in batches]))


@paddle.no_grad()
def write_sample(model: GPT, length: int, seed: int) -> str:
    """Lets the model go on from ``PROMPT`` for ``length`` characters; the same text on every rank."""
    random = np.random.default_rng(seed)
    codes = _encode(PROMPT).tolist()
    for _ in range(length):
        recent = paddle.to_tensor([codes[-model.shape.context :]])
        chances = F.softmax(model(recent)[0, -1] / 0.6).numpy().astype(np.float64)
        codes.append(int(random.choice(len(ALPHABET), p=chances / chances.sum())))
    return "".join(ALPHABET[code] for code in codes)


class Training(NamedTuple):
    """What a script holds after the set-up: the same layer as without sharding, and the optimizer that shards it."""

    model: GPT
    optimizer: Any
    schedule: paddle.optimizer.lr.LRScheduler


def prepare(args: argparse.Namespace) -> Training:
    """The set-up. Without sharding it would be the same lines less the flag, with Paddle's own ``fleet``."""
    world = paddle.distributed.get_world_size()
    shard_ranks = args.sharding_degree or world
    strategy = fleet.DistributedStrategy()
    strategy.hybrid_configs = {"dp_degree": max(world // shard_ranks, 1), "sharding_degree": shard_ranks}
    strategy.hp_sharding_configs = sharding_flags(args)
    fleet.init(is_collective=True, strategy=strategy)

    paddle.seed(args.seed)
    model = fleet.distributed_model(GPT(Shape(args.layers, args.width, args.heads, args.context)))
    warmup_steps = max(args.steps // 20, 1)
    decay = paddle.optimizer.lr.CosineAnnealingDecay(args.lr, T_max=max(args.steps - warmup_steps, 1))
    schedule = paddle.optimizer.lr.LinearWarmup(decay, warmup_steps, args.lr / (warmup_steps + 1), args.lr)
    optimizer = paddle.optimizer.AdamW(
        learning_rate=schedule,
        parameters=model.parameters(),
        weight_decay=0.1,
        grad_clip=paddle.nn.ClipGradByGlobalNorm(1.0),
    )
    return Training(model, fleet.distributed_optimizer(optimizer), schedule)


def sharding_flags(args: argparse.Namespace) -> dict[str, Any]:
    """The strategy's flag, from the command line. What was not given there keeps the library's default."""
    flags = {
        "stage": args.stage,
        "allgather_overlap": args.allgather_overlap,
        "reduce_overlap": args.reduce_overlap,
        "comm_fusion": args.comm_fusion,
        "comm_buffer_size_MB": args.comm_buffer_size_mb,
        "prefetch_depth": args.prefetch_depth,
        "reshard_after_step": args.reshard_after_step,
        "timeline": True,
    }
    return {key: value for key, value in flags.items() if value is not None}


def resume(training: Training, random: np.random.Generator, args: argparse.Namespace) -> int:
    """Goes on from the last complete checkpoint, if there is one. Returns how many steps it had made."""
    latest = hp_sharding.latest_checkpoint(args.checkpoints) if args.checkpoints else None
    if latest is None:
        return 0
    loaded = hp_sharding.load(latest, training.model, training.optimizer)
    if loaded.rank_extra is not None:  # another number of ranks draws other batches
        random.bit_generator.state = loaded.rank_extra["batches"]
    if paddle.distributed.get_rank() == 0:
        print(f"resumed from {latest}, after {loaded.steps} steps")
    return loaded.steps


def keep(training: Training, random: np.random.Generator, args: argparse.Namespace) -> None:
    """Saves a checkpoint behind the training, every ``args.save_every`` steps."""
    steps = training.optimizer.steps
    if args.checkpoints and (steps % args.save_every == 0 or steps == args.steps):
        hp_sharding.save(
            Path(args.checkpoints) / f"step-{steps}",
            training.model,
            training.optimizer,
            rank_extra={"batches": random.bit_generator.state},
            asynchronous=steps < args.steps,
        )


def train(training: Training, corpus: Corpus, args: argparse.Namespace) -> None:
    """Runs up to ``args.steps`` steps, every rank on batches of its own, with a progress bar on rank 0."""
    rank, world = paddle.distributed.get_rank(), paddle.distributed.get_world_size()
    random = np.random.default_rng([args.seed, rank])
    done = resume(training, random, args)
    tokens_per_step = world * args.batch * args.context
    smooth_loss = 0.0
    bar = tqdm(
        total=args.steps, initial=done, desc="training", unit="step", disable=rank != 0, mininterval=1.0, ncols=100
    )
    begin_s = time.perf_counter()
    with bar:
        for step in range(args.steps - done):
            loss = loss_of(training.model, draw_batch(corpus.train, args.batch, args.context, random))
            loss.backward()
            training.optimizer.step()
            training.optimizer.clear_grad()
            training.schedule.step()
            keep(training, random, args)
            smooth_loss += (float(loss) - smooth_loss) / min(step + 1, 20)
            tokens_per_s = (step + 1) * tokens_per_step / (time.perf_counter() - begin_s)
            bar.set_postfix_str(f"loss {smooth_loss:.3f}, {tokens_per_s:,.0f} tokens/s", refresh=False)
            bar.update()


def report_table(optimizer: Any) -> str:
    """Where the time of a step went, and the memory of the model state beside what the formula expects."""
    times = optimizer.timeline.summary()
    memory = optimizer.memory_report()
    sent_anything = times["gather_ms"] + times["reduce_ms"] + times["replicate_ms"] > 0
    rows = [
        ("step", f"{times['step_ms']:10.1f} ms"),
        ("  compute", f"{times['compute_ms']:10.1f} ms"),
        ("  gather, in the background", f"{times['gather_ms']:10.1f} ms"),
        ("  reduce, in the background", f"{times['reduce_ms']:10.1f} ms"),
        ("  replicate, in the background", f"{times['replicate_ms']:10.1f} ms"),
        ("  exposed communication", f"{times['exposed_ms']:10.1f} ms"),
        ("  communication hidden", f"{times['overlap_percent']:10.1f} %" if sent_anything else "there was none"),
        ("model state, measured", f"{memory['measured_bytes'] / 2**20:10.2f} MiB"),
        ("model state, by the formula", f"{memory['formula_bytes'] / 2**20:10.2f} MiB"),
    ]
    return "\n".join(f"  {name:<30}{value}" for name, value in rows)


def parse_arguments() -> argparse.Namespace:
    """The command line; every flag of the second group reaches the strategy."""
    parser = argparse.ArgumentParser(description="Trains a small GPT on Python's standard library, sharded.")
    optional = argparse.BooleanOptionalAction
    model = parser.add_argument_group("model and training")
    model.add_argument("--steps", type=int, default=300)
    model.add_argument("--layers", type=int, default=4)
    model.add_argument("--width", type=int, default=128)
    model.add_argument("--heads", type=int, default=4)
    model.add_argument("--context", type=int, default=64, help="characters that the model sees")
    model.add_argument("--batch", type=int, default=16, help="sequences of each rank")
    model.add_argument("--lr", type=float, default=3e-3, help="peak learning rate")
    model.add_argument("--seed", type=int, default=0)
    model.add_argument("--sample", type=int, default=300, help="characters of text written at the end")
    model.add_argument("--checkpoints", help="folder to save in, and to resume from (default: none)")
    model.add_argument("--save-every", type=int, default=100, help="steps between two checkpoints")
    sharding = parser.add_argument_group("sharding")
    sharding.add_argument("--stage", type=int, default=2, help="1: optimizer state, 2: gradients too, 3: all")
    sharding.add_argument("--sharding-degree", type=int, help="ranks of one shard group (default: all)")
    sharding.add_argument("--allgather-overlap", action=optional, default=True, help="gather under the next forward")
    sharding.add_argument("--reduce-overlap", action=optional, default=True, help="reduce under the backward")
    sharding.add_argument("--comm-fusion", action=optional, help="one collective per bucket, not per parameter")
    sharding.add_argument("--comm-buffer-size-mb", type=float, default=1.0, help="size of a bucket")
    sharding.add_argument("--prefetch-depth", type=int, help="units gathered ahead of use, where memory is short")
    sharding.add_argument("--reshard-after-step", action=optional, help="free the full parameters after each step")
    args = parser.parse_args()
    for name, least in (
        ("steps", 2),
        ("layers", 1),
        ("width", 1),
        ("heads", 1),
        ("context", 1),
        ("batch", 1),
        ("save_every", 1),
    ):
        if getattr(args, name) < least:
            parser.error(f"--{name.replace('_', '-')} must be at least {least}")
    if args.width % args.heads:
        parser.error(f"--width {args.width} must be a multiple of --heads {args.heads}")
    return args


def main() -> None:
    """Trains, then prints on rank 0 what came of it."""
    args = parse_arguments()
    training = prepare(args)
    corpus = read_corpus()
    before = held_out_loss(training.model, corpus, args)
    train(training, corpus, args)
    table = report_table(training.optimizer)
    training.model.eval()
    after = held_out_loss(training.model, corpus, args)
    sample = write_sample(training.model, args.sample, args.seed)
    if paddle.distributed.get_rank() == 0:
        print(f"\nheld-out loss: {before:.3f} before, {after:.3f} after {args.steps} steps")
        print(f"\na sample after the prompt {PROMPT!r}:\n{sample}")
        print(f"\nmedians of a step on rank 0 of {paddle.distributed.get_world_size()}:\n{table}")


if __name__ == "__main__":
    main()
