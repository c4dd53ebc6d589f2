"""``python -m zeromesh``: the command line."""

from zeromesh.apps.cli.main import main

if __name__ == "__main__":
    main()
