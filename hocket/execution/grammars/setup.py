"""From settings to the grammars of a worker's requests."""

from __future__ import annotations

from hocket.config import WorkerSettings
from hocket.execution.grammars.compiler import GrammarCompiler
from hocket.execution.grammars.requests import GrammarRequests
from hocket.execution.model_setup import ModelSetup


def set_up_grammars(settings: WorkerSettings, model: ModelSetup) -> GrammarRequests:
    """Nothing is started before the first grammar comes. Where the checkpoint has no tokenizer,
    there are no words to apply one to."""
    folder, config = settings.model.checkpoint(), model.runner.model.config
    if not (folder / "tokenizer.json").is_file():
        return GrammarRequests(None)
    compiler = GrammarCompiler.of_checkpoint(
        folder, config.vocab_size, config.eos_token_ids, settings.grammar
    )
    return GrammarRequests(compiler)
