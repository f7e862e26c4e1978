# Tandem without a GPU:  docker build -t tandem .  &&  docker run --rm -it --shm-size=1g tandem
# docs/install.md says more. The words after the image's name are those of launch.sh; none is the quick start.
FROM python:3.11-slim-bookworm

# g++: DeepSpeed compiles a small CPU helper.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*

ENV BACKEND=cpu PIP_NO_CACHE_DIR=1 PYTHONUNBUFFERED=1
WORKDIR /tandem

# What an installation depends on comes first, so that a change of the code installs nothing again.
COPY launch.sh requirements.txt requirements-cpu.lock requirements-gpu.lock ./
COPY trainer/__init__.py trainer/
COPY trainer/engine/__init__.py trainer/engine/build_locks.py trainer/engine/
RUN bash launch.sh setup

COPY . .
ENTRYPOINT ["bash", "launch.sh"]
