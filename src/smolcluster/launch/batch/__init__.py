"""Runs on machines that a batch system allocates: job files for Slurm, Kubernetes and Docker Compose.

    job.py           what is trained and on how much, checked: a `BatchJob`
    slurm.py         an sbatch file of it              `smolcluster slurm`
    kubernetes.py    a stream of manifests             `smolcluster k8s`
    compose.py       a compose file                    `smolcluster compose`
    containers.py    what the last two share: where things lie in a container, and how one starts
    text.py          YAML as other programs read it; times as Slurm writes them
    submit.py        files written, sbatch, kubectl and docker called

Rendering is pure: text out of a `BatchJob` and the settings of that system. No cluster is spoken to before `submit`.
"""
