"""The subcommands of `hocket`, one module each; `hocket.cli` imports them when they are run."""
