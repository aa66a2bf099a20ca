"""The same training from Python: one worker and two, the same batch in all, the same model in the end.

python examples/from_python.py
"""

from pathlib import Path

import smolcluster

TASK = Path(__file__).with_name("my_task.py")


def main() -> None:
    settings = {"training.steps": 300, "training.learning_rate": 3e-3, "logging.log_interval": 50}
    alone = smolcluster.train(f"{TASK}:Sine", overrides={**settings, "training.batch_size": 64})
    together = smolcluster.train(f"{TASK}:Sine", workers=2, overrides={**settings, "training.batch_size": 32})

    for summary in (alone, together):
        print(f"{summary['workers']} worker(s): validation loss {summary['val_loss']:.6f}, in {summary['run_dir']}")


if __name__ == "__main__":
    main()
