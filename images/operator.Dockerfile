# The image of the operator and of coordinators, without torch. `make images` builds it; see docs/images.md.
#
#   BASE_IMAGE   a Debian with Python 3.11 or newer

ARG BASE_IMAGE=python:3.11-slim

FROM ${BASE_IMAGE} AS requirements
WORKDIR /source
COPY pyproject.toml constraints.txt images/requirements.py ./
RUN python3 requirements.py operator /requirements

FROM ${BASE_IMAGE} AS dependencies
WORKDIR /work
RUN command -v tini > /dev/null || { apt-get update && apt-get install -y --no-install-recommends 'tini=0.19.*' \
    && rm -rf /var/lib/apt/lists/* /var/cache/apt/* /var/log/*; }
# Some base images lack the bytecode of Python's own modules. Pods cannot write it, and would compile at each start.
RUN echo "tandem:x:65532:65532::/tmp:/sbin/nologin" >> /etc/passwd && echo "tandem:x:65532:" >> /etc/group \
    && python3 -m venv --without-pip /opt/tandem \
    && python3 -m compileall -qq "$(python3 -c 'import sysconfig; print(sysconfig.get_path("stdlib"))')"
COPY images/install.sh images/bytecode.py /requirements/
COPY --from=requirements /requirements/rest.txt /requirements/constraints.txt /requirements/
# Three quarters of this layer would be generated classes for every kind of object in Kubernetes, of which few are ever
# loaded: only their bytecode stays, without docstrings.
RUN --mount=type=secret,id=pip.conf,target=/run/pip.conf sh /requirements/install.sh -r rest.txt \
    && rm -rf /requirements \
    && for folder in /opt/tandem/lib/python3*/site-packages/kubernetes/client/api \
                     /opt/tandem/lib/python3*/site-packages/kubernetes/client/models \
                     /opt/tandem/lib/python3*/site-packages/kubernetes/aio/client/api \
                     /opt/tandem/lib/python3*/site-packages/kubernetes/aio/client/models; do \
           rm -r "$folder/__pycache__" \
           && python3 -OO -m compileall -qq -b --invalidation-mode unchecked-hash "$folder" \
           && find "$folder" -name "*.py" -delete || exit 1; \
       done

FROM dependencies AS code
# The command line is for users' machines: neither its code nor its command is in an image.
COPY --from=requirements /requirements /source
COPY images/install.sh images/bytecode.py images/sbom.py pyproject.toml README.md /source/
COPY core /source/core
COPY coordinator /source/coordinator
COPY operator /source/operator
RUN --mount=type=secret,id=pip.conf,target=/run/pip.conf \
    sh /source/install.sh --root /overlay ".[operator]" \
    && rm /overlay/opt/tandem/bin/tandem \
    && /opt/tandem/bin/python /source/sbom.py tandem-operator /overlay

FROM dependencies
COPY --from=code /overlay /
LABEL org.opencontainers.image.title="tandem-operator" \
      org.opencontainers.image.description="Runs distributed training jobs on Kubernetes: operator and coordinator"
# Pods have a read-only root, and can only write to /tmp.
ENV PATH=/opt/tandem/bin:$PATH \
    HOME=/tmp TMPDIR=/tmp USER=tandem \
    PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
USER 65532:65532
ENTRYPOINT ["tini", "--"]
CMD ["python", "-m", "tandem_operator"]
