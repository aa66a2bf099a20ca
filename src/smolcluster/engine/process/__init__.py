"""Entry points of worker and server processes.

main.py                        from the specification on standard input to the exit status
warm_mesh.py, warm_elastic.py  processes with torch imported before they are needed
title.py                       the name in `ps`
"""
