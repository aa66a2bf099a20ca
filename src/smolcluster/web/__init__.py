"""What every HTTP face of ours has in common: the dashboard's (`dashboard/`) and that of inference (`serve/`).

guard.py      who may ask: Host, verb, Origin, key; the headers of every answer
bodies.py     what was asked: a JSON body of bounded size, depth and patience
pages.py      plain files with their tags; static/ has those that all pages share
streams.py    answers that go on until the viewer leaves
server.py     one port, with patience and room for so many and no more
"""
