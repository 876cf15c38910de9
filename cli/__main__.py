"""``python -m gradwire.cli``: the ``gradwire`` command."""

from gradwire.cli.app import app

if __name__ == "__main__":
    app(prog_name="gradwire")
