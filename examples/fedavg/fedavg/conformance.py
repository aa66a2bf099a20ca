"""For `python -m pytest tests/conformance -m "" -p fedavg.conformance -k fedavg`: where it computes what `single` computes."""

from tests.conformance.cases import SETTINGS, Setting

# With three steps in a round some checkpoints fall into the middle of one.
SETTINGS["fedavg"] = Setting(
    options={"local_steps": 2}, workers=(1, 3), alone=True, exact=True, more={"mesh": [{"local_steps": 3}]}
)
