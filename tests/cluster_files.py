"""Cluster files of Ray in the form that `ray up` takes for Google's TPUs, as Marin's and Levanter's are."""

from __future__ import annotations

from typing import Final

LAB: Final = """\
# A head, elastic workers of one host, and slices.
cluster_name: lab-us-central2
max_workers: 1024
idle_timeout_minutes: 15
upscaling_speed: 4.0
auth: {ssh_user: ray, ssh_private_key: ~/.ssh/lab.pem}
provider:
  type: gcp
  region: us-central2
  availability_zone: us-central2-b
  project_id: lab-1234
docker:
  image: "us-central2-docker.pkg.dev/lab-1234/lab/lab_cluster:20260101"
  container_name: ray_docker
  pull_before_run: true
  worker_run_options:
    - --privileged
    - --restart=on-failure
    - --ulimit memlock=-1:-1
    - --ulimit nproc=4096:8192
    - --shm-size=200gb
    - -v
    - "/tmp:/tmp"
    - -v "/etc/passwd:/etc/passwd:ro"
    - -v "/var/run/docker.sock:/var/run/docker.sock"
    - -e LAB_PREFIX=gs://lab-us-central2
    - -e TPU_LOG_DIR=disabled
    - -e RAY_TPU_MAX_CONCURRENT_ACTIVE_CONNECTIONS=64
    - -e TPU_WORKER_ID
  head_run_options:
    - --privileged
    - -v "/tmp:/tmp"
    - -e LAB_PREFIX=gs://lab-us-central2
file_mounts:
  /home/ray/tool: ./tool
initialization_commands:
  - yes | gcloud auth configure-docker us-central2-docker.pkg.dev
  - which docker || (curl -fsSL https://get.docker.com -o get-docker.sh; sudo sh get-docker.sh)
  - sudo usermod -aG docker $USER
  - sudo chmod 666 /var/run/docker.sock
  - mkdir -p /mnt/cache
setup_commands:
  - gcloud config set project lab-1234
  - gcloud config set compute/zone us-central2-b
  - mkdir $HOME/.cache/huggingface -p
  - gcloud secrets versions access latest --secret=HF_TOKEN > $HOME/.cache/huggingface/token
  - export OPENAI_API_KEY=$(gcloud secrets versions access 3 --secret="openai_key" --project other-5678)
  - gcloud secrets versions access latest --secret=RAY_CLUSTER_PUBLIC_KEY > $HOME/.ssh/lab.pub
  - export BUCKET=lab-us-central2
  - gcsfuse --only-dir data $BUCKET /opt/data || true
  - pip install "lab[all]"
head_node_type: head_default
available_node_types:
  head_default:
    min_workers: 0
    max_workers: 0
    resources: {"CPU": 1}
    node_config:
      machineType: n2-standard-8
      disks:
        - boot: true
          autoDelete: true
          type: PERSISTENT
          initializeParams:
            diskSizeGb: 200
            sourceImage: projects/ubuntu-os-cloud/global/images/family/ubuntu-2204-lts
  tpu_worker:
    min_workers: 4
    max_workers: 512
    resources: {CPU: 120, TPU: 4, fast_disk: 1}
    node_config:
      acceleratorType: v4-8
      runtimeVersion: tpu-ubuntu2204-base
      schedulingConfig: {preemptible: true}
  steady:
    min_workers: 0
    max_workers: 8
    resources: {CPU: 120, TPU: 4}
    node_config: {acceleratorType: v4-8, runtimeVersion: tpu-ubuntu2204-base}
  tpu_slice_v4_16:
    min_workers: 0
    max_workers: 1024
    resources: {CPU: 120, TPU: 4}
    node_config:
      acceleratorType: v4-16
      runtimeVersion: tpu-ubuntu2204-base
      schedulingConfig: {preemptible: true}
  kept:
    min_workers: 2
    max_workers: 2
    node_config:
      acceleratorType: v4-8
      runtimeVersion: tpu-ubuntu2204-base
      schedulingConfig: {reserved: true}
"""

SMALL: Final = """\
cluster_name: levant
provider: {type: gcp, region: us-west4, availability_zone: us-west4-a, project_id: lab-1234}
max_workers: 6000
available_node_types:
  head:
    node_config: {machineType: n2-standard-2, disks: [{initializeParams: {diskSizeGb: 20}}]}
  one: {min_workers: 0, resources: {CPU: 12}, node_config: {acceleratorType: v5litepod-1, runtimeVersion: v2-alpha-tpuv5-lite}}
  four:
    node_config:
      acceleratorType: v5litepod-4
      runtimeVersion: v2-alpha-tpuv5-lite
      schedulingConfig: {spot: true}
  eight: {node_config: {acceleratorType: v5litepod-8, runtimeVersion: v2-alpha-tpuv5-lite}}
  cpu: {node_config: {machineType: n2-standard-32}}
docker: {image: "ghcr.io/lab/levant-cluster:latest", worker_run_options: [--shm-size=32gb]}
head_node_type: head
"""
