"""Train `hocket-tiny`, the model that ships with Hocket, from the docstrings that lie around.

    python tools/train_tiny_model.py --minutes 90 --out hocket/checkpoints/hocket-tiny

needs torch, numpy, tokenizers, safetensors, and as corpus ray, transformers and kubernetes. A
usable checkpoint appears after about three minutes and is replaced as training goes on. Text and
order are fixed by the seed; the number of steps depends on the machine, since time is the limit.
See the `tiny_model` package next to this file for how it works.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))

from tiny_model.card import write_card
from tiny_model.corpus import EncodedDocuments, collect_corpus, train_tokenizer
from tiny_model.evaluation import evaluate
from tiny_model.export import load_model, save_checkpoint
from tiny_model.network import Shape, TinyModel
from tiny_model.ranks import Group, run_ranks
from tiny_model.training import Trainer, log_to_json


def main() -> None:
    arguments = _arguments()
    _keep_freed_memory()
    torch.set_num_threads(1)

    started_s = time.monotonic()
    corpus = collect_corpus()
    tokenizer = train_tokenizer(corpus.train)
    train = EncodedDocuments(corpus.train, tokenizer)
    held_out = EncodedDocuments(corpus.held_out, tokenizer)
    print(
        f"corpus: {len(train)} documents of {train.num_tokens} tokens, {len(held_out)} held out, "
        f"{time.monotonic() - started_s:.0f} s",
        flush=True,
    )

    log_path = arguments.out / "training_log.json"
    if arguments.minutes > 0:

        def save(model: TinyModel) -> None:
            save_checkpoint(model, tokenizer, arguments.out)

        def work(group: Group) -> None:
            torch.manual_seed(arguments.seed)
            model = TinyModel(Shape())
            trainer = Trainer(model, train, held_out, arguments.seed, group, save)
            log = trainer.run(arguments.minutes)
            if group.rank == 0:
                save(model)
                _write_json(log_path, {"training": log_to_json(log)})

        run_ranks(work)
    training = json.loads(log_path.read_text())["training"]

    evaluation = evaluate(load_model(arguments.out), tokenizer, held_out)
    log = {"training": training, "evaluation": evaluation}
    _write_json(log_path, log)
    write_card(arguments.out, corpus, train, held_out, log)
    print(f"written to {arguments.out}", flush=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="checkpoint folder")
    parser.add_argument(
        "--minutes",
        type=float,
        default=90.0,
        help="wall time of training; 0 only evaluates what lies in --out (default 90)",
    )
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def _keep_freed_memory() -> None:
    """Let glibc's malloc re-use big buffers: returning them costs a page fault per 4 KiB a step."""
    m_trim_threshold, m_mmap_max = -1, -4
    try:
        libc = ctypes.CDLL("libc.so.6")
    except OSError:
        return
    libc.mallopt(m_mmap_max, 0)
    libc.mallopt(m_trim_threshold, 2**31 - 1)


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n")


if __name__ == "__main__":
    main()
