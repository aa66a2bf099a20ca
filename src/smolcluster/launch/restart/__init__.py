"""`train --elastic`: workers of the mesh plane that start again as many as there are."""
