"""``python -m moh experiment=NAME``: compose, validate, freeze, train, evaluate, record."""

from moh.cli import main

if __name__ == "__main__":
    main()
