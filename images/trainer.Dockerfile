# The trainers' image: torchrun's agent and the ranks that it starts, and evaluators on GPUs. `make images` builds it; see docs/images.md.
#
#   BASE_IMAGE   a Debian with Python 3.11 or newer
#   TORCH_INDEX  the package index of torch; empty: as pip is configured
#   CPU_ONLY     1 removes the parts of a CUDA build of torch that a CPU never loads

ARG BASE_IMAGE=python:3.11-slim

# Up to the next mark this file and evaluator.Dockerfile are the same, so that both images share these layers.

FROM ${BASE_IMAGE} AS requirements
WORKDIR /source
COPY pyproject.toml constraints.txt images/requirements.py ./
RUN python3 requirements.py evaluator /requirements

FROM ${BASE_IMAGE} AS dependencies
WORKDIR /work
RUN command -v tini > /dev/null || { apt-get update && apt-get install -y --no-install-recommends 'tini=0.19.*' \
    && rm -rf /var/lib/apt/lists/* /var/cache/apt/* /var/log/*; }
# Some base images lack the bytecode of Python's own modules. Pods cannot write it, and would compile at each start.
RUN echo "tandem:x:65532:65532::/tmp:/sbin/nologin" >> /etc/passwd && echo "tandem:x:65532:" >> /etc/group \
    && python3 -m venv --without-pip /opt/tandem \
    && python3 -m compileall -qq "$(python3 -c 'import sysconfig; print(sysconfig.get_path("stdlib"))')"
COPY images/install.sh images/bytecode.py images/cpu_only.py /requirements/
COPY --from=requirements /requirements/torch.txt /requirements/constraints.txt \
     /requirements/constraints-without-cuda.txt /requirements/
ARG TORCH_INDEX=
ARG CPU_ONLY=
RUN --mount=type=secret,id=pip.conf,target=/run/pip.conf sh /requirements/install.sh -r torch.txt
COPY --from=requirements /requirements/rest.txt /requirements/
RUN --mount=type=secret,id=pip.conf,target=/run/pip.conf sh /requirements/install.sh -r rest.txt \
    && rm -rf /requirements

# End of the shared layers.

FROM dependencies AS code
# The command line is for users' machines: neither its code nor its command is in an image.
COPY --from=requirements /requirements /source
COPY images/install.sh images/bytecode.py images/cpu_only.py images/sbom.py pyproject.toml README.md /source/
COPY core /source/core
COPY trainer /source/trainer
COPY evaluator /source/evaluator
ARG TORCH_INDEX=
RUN --mount=type=secret,id=pip.conf,target=/run/pip.conf \
    CPU_ONLY= sh /source/install.sh --root /overlay ".[trainer]" \
    && rm /overlay/opt/tandem/bin/tandem \
    && /opt/tandem/bin/python /source/sbom.py tandem-trainer /overlay

FROM dependencies
COPY --from=code /overlay /
LABEL org.opencontainers.image.title="tandem-trainer" \
      org.opencontainers.image.description="Elastic PyTorch training: torchrun's agent with Tandem's rendezvous"
# Pods have a read-only root, and can only write to /tmp. Torch asks for the user's name, and some clusters assign the user.
ENV PATH=/opt/tandem/bin:$PATH \
    HOME=/tmp TMPDIR=/tmp USER=tandem \
    PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
USER 65532:65532
ENTRYPOINT ["tini", "--"]
CMD ["python", "-m", "tandem_trainer.agent"]
