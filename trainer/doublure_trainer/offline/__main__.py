"""`python -m doublure_trainer.offline` is `doublure train`."""

from ..train_command import main

if __name__ == "__main__":
    main("python -m doublure_trainer.offline")
