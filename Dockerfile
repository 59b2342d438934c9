# One image for every role; compose.yaml gives each container its command.
#
#   docker build -t afterplay .
#
# TORCH       what to install as torch, with any pip options it needs (another index, a version, a CPU build).
# EXTRAS      extras of the package, for example [quickstart] or [vllm].
# APT         Debian packages to add: vLLM on a GPU compiles kernels while it runs and needs g++.
# PIP_EXTRA   options for every pip call, for example --no-index --find-links=/wheels.
ARG BASE=python:3.11-slim-bookworm
FROM ${BASE}

ARG APT=""
ARG PIP_EXTRA=""
ARG TORCH="torch>=2.10"
ARG EXTRAS=""

ENV PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_ROOT_USER_ACTION=ignore \
    PYTHONUNBUFFERED=1 \
    PATH=/opt/afterplay/bin:$PATH

RUN if [ -n "${APT}" ]; then \
      apt-get update && apt-get install -y --no-install-recommends ${APT} && rm -rf /var/lib/apt/lists/*; \
    fi
RUN python -m venv /opt/afterplay \
 && useradd --system --uid 10001 --user-group --home-dir /home/afterplay --create-home afterplay \
 && install -d -o afterplay -g afterplay /runs /keys /peers/learner /peers/actor /secrets \
      /engine_keys/actor /engine_keys/learner

# The versions that the tests passed with.
WORKDIR /src
COPY constraints.txt ./
ENV PIP_CONSTRAINT=/src/constraints.txt
RUN pip install ${PIP_EXTRA} ${TORCH}

# The dependencies alone, so that a change of the source does not install them again.
COPY pyproject.toml ./
RUN python -c "import tomllib; print('\n'.join(tomllib.load(open('pyproject.toml', 'rb'))['project']['dependencies']))" > /tmp/requirements.txt \
 && pip install ${PIP_EXTRA} hatchling -r /tmp/requirements.txt

COPY README.md LICENSE ./
COPY afterplay afterplay
COPY pipeline pipeline
COPY actors actors
COPY learner learner
COPY configs configs
RUN pip install ${PIP_EXTRA} --no-build-isolation ".${EXTRAS}"

ARG REVISION=unknown
ENV AFTERPLAY_REVISION=${REVISION}
COPY configs /app/configs
WORKDIR /app
USER afterplay
ENTRYPOINT ["afterplay"]
CMD ["--help"]
