"""The version of the package; read by the build, the CLI and the gateway."""

__version__ = "0.1.0"
