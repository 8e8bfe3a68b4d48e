"""MODEL_CARD.md and its figure, from the numbers in training_log.json.

The prose is in `card_template.md`; here its blanks are filled.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .corpus import CHAT_PROMPTS, HELD_OUT_PERCENT, Corpus, EncodedDocuments
from .export import load_model
from .network import TinyModel

_TEMPLATE = Path(__file__).with_name("card_template.md")
_SAMPLE_CHARS = 700


def write_card(
    folder: Path,
    corpus: Corpus,
    train: EncodedDocuments,
    held_out: EncodedDocuments,
    log: dict[str, Any],
) -> None:
    """Write MODEL_CARD.md and loss.svg into the checkpoint folder; `log` is training_log.json."""
    training, results = log["training"], log["evaluation"]
    settings, text = training["settings"], results["held_out_text"]
    model = load_model(folder)
    card = _TEMPLATE.read_text().format(
        architecture=_architecture(model, (folder / "model.safetensors").stat().st_size),
        mtp_layer=model.shape.num_hidden_layers,
        max_positions=model.shape.max_position_embeddings,
        sources=_sources(corpus),
        questions=_questions(),
        train_tokens=f"{train.num_tokens:,}",
        train_documents=f"{len(train):,}",
        held_out_percent=f"{HELD_OUT_PERCENT:g}",
        held_out_tokens=f"{held_out.num_tokens:,}",
        held_out_documents=f"{len(held_out):,}",
        minutes=round(training["wall_s"] / 60),
        num_ranks=training["num_ranks"],
        python=training["python"],
        torch=training["torch"],
        joint_steps=f"{training['joint_steps']:,}",
        joint_tokens=f"{training['joint_tokens'] / 1e6:.1f}",
        draft_steps=f"{training['draft_steps']:,}",
        draft_tokens=f"{training['draft_tokens'] / 1e6:.1f}",
        mtp_loss_weight=settings["mtp_loss_weight"],
        row_tokens=settings["row_tokens"],
        long_every=settings["long_every"],
        long_tokens=settings["joint_long_row_tokens"],
        passes=settings["draft_passes"],
        pass_weights=", ".join(map(str, settings["pass_weights"])),
        soft_share=f"{1 - settings['argmax_share']:.0%}",
        argmax_share=f"{settings['argmax_share']:.0%}",
        progress=_progress(training["points"]),
        num_prompts=results["num_prompts"],
        prompt_tokens=results["prompt_tokens"],
        num_positions=results["num_positions"],
        acceptance=_acceptance(results),
        equal_on_text=_percent(text["first_draft_equal"]),
        num_targets=f"{text['num_targets']:,}",
        loss_nats=f"{text['main_loss_nats']:.3f}",
        bits_per_byte=f"{text['main_bits_per_byte']:.3f}",
        samples=_samples(results["samples"]),
    )
    (folder / "MODEL_CARD.md").write_text(card)
    (folder / "loss.svg").write_text(_figure(training["points"]))


def _architecture(model: TinyModel, file_bytes: int) -> str:
    s = model.shape
    total = sum(parameter.numel() for parameter in model.parameters())
    mtp = sum(parameter.numel() for parameter in model.mtp.parameters())
    num_moe = s.num_hidden_layers - s.first_k_dense_replace
    expert = 3 * s.hidden_size * s.moe_intermediate_size
    idle = num_moe * (s.n_routed_experts - s.num_experts_per_tok) * expert
    experts = (
        f"{s.n_routed_experts} of width {s.moe_intermediate_size}, top-{s.num_experts_per_tok} "
        f"within {s.topk_group} of {s.n_group} groups, {s.n_shared_experts} shared; sigmoid scores "
        f"with correction bias, scaling {s.routed_scaling_factor}"
    )
    attention = (
        f"MLA: {s.num_attention_heads} heads, query rank {s.q_lora_rank}, latent {s.kv_lora_rank}, "
        f"head {s.qk_nope_head_dim} + {s.qk_rope_head_dim} rotary, value {s.v_head_dim}, "
        f"theta {s.rope_theta:g}"
    )
    rows = [
        ("parameters", f"{total:,}, {mtp:,} of them in the MTP module"),
        ("used for a token", f"{total - mtp - idle:,} without the MTP module"),
        (
            "layers",
            f"{s.num_hidden_layers}, the first {s.first_k_dense_replace} dense; and one MTP",
        ),
        ("hidden size", f"{s.hidden_size}; dense FFN {s.intermediate_size}"),
        ("experts", experts),
        ("attention", attention),
        ("vocabulary", f"{s.vocab_size}, byte-level BPE; embedding and head are not tied"),
        ("file", f"{file_bytes / 1e6:.1f} MB"),
    ]
    return _table(("", ""), rows)


def _questions() -> str:
    blanks = {"name": "NAME", "signature": "SIGNATURE"}
    return "\n".join(f"- {prompt.format(**blanks)}" for prompt in CHAT_PROMPTS)


def _sources(corpus: Corpus) -> str:
    header = ("package", "version", "licence", "documents", "characters")
    return _table(
        header,
        [
            (s.package, s.version, s.licence, f"{s.num_documents:,}", f"{s.num_chars / 1e6:.2f} M")
            for s in corpus.summaries
        ],
    )


def _progress(points: list[dict[str, Any]]) -> str:
    """Every third point and both ends."""
    equal = [f"rollout_equal_{p}" for p in (1, 2, 3)]
    rows = [
        (
            point["stage"],
            point["minutes"],
            f"{point['tokens'] / 1e6:.2f} M",
            point["held_out_main"],
            point["held_out_mtp"],
            *(_percent(point[name]) if name in point else "" for name in equal),
        )
        for point in [*points[:-1:3], points[-1]]
    ]
    drafts = ("draft 1 equal", "draft 2 equal", "draft 3 equal")
    return _table(("stage", "minutes", "tokens", "main loss", "MTP loss", *drafts), rows)


def _acceptance(results: dict[str, Any]) -> str:
    rows = []
    for mode, label in (("greedy", "greedy"), ("sampled_t1", "T = 1")):
        for kind in ("plain", "chat"):
            r = results[mode][kind]
            rows.append(
                (
                    label,
                    kind,
                    *(_percent(value) for value in r["survival_by_position"]),
                    " / ".join(_percent(value) for value in r["conditional_by_position"][1:]),
                    " / ".join(f"{value:.2f}" for value in r["acceptance_length_by_k"]),
                    _percent(r["repeated_share"]),
                    _percent(r["first_draft_on_new_text"]),
                )
            )
    given = "2, 3, 4 given the one before"
    lengths = "tokens a step at k = 1 / 2 / 3 / 4"
    positions = ("1", "2", "3", "4")
    header = ("decoding", "prompts", *positions, given, lengths, "repeated", "new")
    return _table(header, rows)


def _samples(samples: list[dict[str, str]]) -> str:
    parts = []
    for sample in samples:
        text = sample["text"]
        if len(text) > _SAMPLE_CHARS:
            text = text[:_SAMPLE_CHARS] + " [...]"
        parts.append(f"{sample['mode']}:\n\n````text\n{sample['prompt']}▶{text}\n````")
    return "\n\n".join(parts)


def _figure(points: list[dict[str, Any]]) -> str:
    """An SVG of the held-out losses over minutes."""
    width, height, left, bottom = 640, 300, 48, 36
    last_minute = max(point["minutes"] for point in points)
    series = {"held_out_main": ("#1f6feb", "main"), "held_out_mtp": ("#d29922", "MTP, first pass")}
    losses = [point[name] for point in points for name in series]
    lowest, highest = min(losses), max(losses)

    def place(minutes: float, loss: float) -> tuple[float, float]:
        x = left + minutes / last_minute * (width - left - 16)
        y = 16 + (highest - loss) / (highest - lowest) * (height - bottom - 24)
        return round(x, 1), round(y, 1)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="{left}" y="{height - 8}">held-out loss (nats a token), 0 to {last_minute:.0f} '
        "minutes; in the last third the main model is frozen</text>",
    ]
    for loss in (lowest + (highest - lowest) * quarter / 4 for quarter in range(5)):
        (x, y), (end, _) = place(0, loss), place(last_minute, loss)
        parts.append(f'<path d="M{x},{y}H{end}" stroke="#ddd"/>')
        parts.append(f'<text x="{x - 40}" y="{y + 4}">{loss:.2f}</text>')
    for number, (name, (colour, label)) in enumerate(series.items()):
        places = (place(point["minutes"], point[name]) for point in points)
        line = " ".join(f"{x},{y}" for x, y in places)
        parts.append(
            f'<polyline points="{line}" stroke="{colour}" stroke-width="2" fill="none"/>'
            f'<text x="{width - 140}" y="{30 + 18 * number}" fill="{colour}">{label}</text>'
        )
    return "\n".join([*parts, "</svg>", ""])


def _table(header: tuple[Any, ...], rows: list[tuple[Any, ...]]) -> str:
    lines = [header, tuple("---" for _ in header), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def _percent(value: float) -> str:
    return f"{value:.1%}"
