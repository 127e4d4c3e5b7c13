"""The commands of `forage`, one module each."""
