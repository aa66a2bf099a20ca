"""`train --elastic`: after a death or a change of machines, restart the mesh plane's workers at the new world size."""
