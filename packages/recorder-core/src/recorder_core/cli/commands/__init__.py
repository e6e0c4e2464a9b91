"""The subcommands: each module's `run` carries one out, and is imported when it is asked for."""
