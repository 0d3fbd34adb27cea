# nxd-infer as a container: `serve` is the default command (SageMaker gives it as the only argument), and every other
# command of nxd-infer works as well. docs/deploying.md says how to give it a model.
#
#   docker build -t nxd-infer:cpu .
#   docker build -t nxd-infer:neuron --target neuron .
ARG CPU_BASE=python:3.11-slim-bookworm
# Neuron SDK 2.31.0, the last whose images hold torch-neuronx for Inf2 and Trn1: torch 2.9, torch-neuronx
# 2.9.0.2.15.32035, neuronx-cc 2.26.6360.0, runtime 2.33.10.0. Its driver, on the host, is aws-neuronx-dkms 2.29.0.0.
# UNVERIFIED: this target was never built from that image, nor run on a Neuron device.
ARG NEURON_BASE=public.ecr.aws/neuron/pytorch-inference-neuronx:2.9.0-neuronx-py312-sdk2.31.0-ubuntu24.04

FROM ${CPU_BASE} AS wheel
WORKDIR /src
COPY pyproject.toml README.md ./
COPY nxd_infer nxd_infer
COPY server server
COPY models models
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheel .

FROM ${NEURON_BASE} AS neuron
USER 0
RUN apt-get update \
    && apt-get install -y --no-install-recommends tini \
    && rm -rf /var/lib/apt/lists/* \
    # Over the image's packages: what we add replaces nothing that AWS has put together.
    && python -m venv --system-site-packages /opt/venv
ENV NXD_INFER_TRACE_OPTIONS="--backend neuron"
ENV PATH=/opt/venv/bin:$PATH PYTHONUNBUFFERED=1 PYTHONNOUSERSITE=1
# More packages for this image, such as gcsfs or adlfs for models in other stores than S3.
ARG PACKAGES=""
RUN --mount=type=bind,from=wheel,source=/wheel,target=/wheel \
    pip install --no-cache-dir "$(echo /wheel/*.whl)[server,otel,hf,s3]" ${PACKAGES} \
    && groupadd --gid 10001 nxd \
    && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /tmp nxd \
    && install --directory --owner 10001 --group 10001 /var/lib/nxd-infer
# From here on as below.
ENV NXD_INFER_ARTIFACT=/opt/ml/model NXD_INFER_HOST=0.0.0.0 NXD_INFER_PORT=8080 \
    NXD_INFER_KEEP=/var/lib/nxd-infer NXD_INFER_CACHE=/var/lib/nxd-infer/cache
USER 10001:10001
VOLUME /var/lib/nxd-infer
EXPOSE 8080
# A first start may trace a model; a check that succeeds ends the start period.
HEALTHCHECK --interval=10s --timeout=5s --start-period=2h \
    CMD ["python", "-c", "import os, urllib.request as u; u.urlopen(f'http://127.0.0.1:{os.environ[\"NXD_INFER_PORT\"]}/readyz', timeout=4)"]
ENTRYPOINT ["tini", "--", "nxd-infer"]
CMD ["serve"]

# Everything that the CPU's image holds, with the native operators built: the image needs no C++ compiler.
FROM ${CPU_BASE} AS built
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/* \
    && python -m venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH
ARG TORCH="torch==2.13.0"
# Where pip finds a CPU build of torch; without it, Linux gets the build for CUDA, which is several GB larger.
ARG TORCH_INDEX=""
RUN pip install --no-cache-dir ${TORCH_INDEX:+--index-url "${TORCH_INDEX}"} "${TORCH}"
# More packages for this image, such as gcsfs or adlfs for models in other stores than S3.
ARG PACKAGES=""
RUN --mount=type=bind,from=wheel,source=/wheel,target=/wheel \
    pip install --no-cache-dir "$(echo /wheel/*.whl)[server,otel,hf,s3]" ${PACKAGES} \
    && NXD_INFER_CACHE=/tmp/cache python -m nxd_infer.backends.cpu --prebuilt \
    && rm -r /tmp/cache

FROM ${CPU_BASE} AS cpu
RUN apt-get update \
    && apt-get install -y --no-install-recommends tini \
    && rm -rf /var/lib/apt/lists/* \
    && groupadd --gid 10001 nxd \
    && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /tmp nxd \
    && install --directory --owner 10001 --group 10001 /var/lib/nxd-infer
COPY --from=built /opt/venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH PYTHONUNBUFFERED=1 PYTHONNOUSERSITE=1
# From here on as above.
ENV NXD_INFER_ARTIFACT=/opt/ml/model NXD_INFER_HOST=0.0.0.0 NXD_INFER_PORT=8080 \
    NXD_INFER_KEEP=/var/lib/nxd-infer NXD_INFER_CACHE=/var/lib/nxd-infer/cache
USER 10001:10001
VOLUME /var/lib/nxd-infer
EXPOSE 8080
# A first start may trace a model; a check that succeeds ends the start period.
HEALTHCHECK --interval=10s --timeout=5s --start-period=2h \
    CMD ["python", "-c", "import os, urllib.request as u; u.urlopen(f'http://127.0.0.1:{os.environ[\"NXD_INFER_PORT\"]}/readyz', timeout=4)"]
ENTRYPOINT ["tini", "--", "nxd-infer"]
CMD ["serve"]
