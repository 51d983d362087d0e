"""`python -P -m tandem_trainer.agent`: the agent of one replica."""

from tandem_trainer.agent.torchrun import main

if __name__ == "__main__":
    main()
