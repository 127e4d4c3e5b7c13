"""The subcommands of `forage`, one module each."""
