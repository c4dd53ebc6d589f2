"""``python -m zeromesh``: the command line."""

from zeromesh.cli.main import main

if __name__ == "__main__":
    main()
