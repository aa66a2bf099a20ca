"""Job files for Slurm, Kubernetes and Docker Compose.

    job.py           check what is trained and on which resources: a `BatchJob`
    slurm.py         render an sbatch file             `smolcluster slurm`
    kubernetes.py    render manifests                  `smolcluster k8s`
    compose.py       render a compose file             `smolcluster compose`
    containers.py    shared by the last two: paths and commands in a container
    text.py          conservative YAML; times as Slurm writes them

Rendering is pure: a `BatchJob` and the system's settings give text. `cli/batch.py` writes and submits it; a
system's variables for the rank are read in launch/environment.py.
"""
