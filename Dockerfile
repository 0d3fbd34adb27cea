# Serve an artifact:  docker run -p 8080:8080 -v $PWD/artifact:/opt/ml/model:ro nxd-infer
# The image holds the CPU build of torch and no compiler: an artifact carries its compiled graphs and operators.
FROM python:3.11-slim AS build
ARG TORCH="torch==2.13.0"
RUN python -m venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
# The CPU wheel index of PyTorch, or any other place that holds a CPU build, can be given at build time.
ARG TORCH_INDEX=""
RUN if [ -n "$TORCH_INDEX" ]; then pip install --index-url "$TORCH_INDEX" "$TORCH"; else pip install "$TORCH"; fi
WORKDIR /src
COPY pyproject.toml README.md ./
COPY nxd_infer nxd_infer
COPY server server
COPY models models
RUN pip install ".[server]"

FROM python:3.11-slim
RUN apt-get update && apt-get install -y --no-install-recommends libgomp1 tini && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 1000 nxd
COPY --from=build /opt/venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH PYTHONUNBUFFERED=1
USER nxd
EXPOSE 8080
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s \
    CMD python -c "import urllib.request as u; u.urlopen('http://127.0.0.1:8080/readyz', timeout=4)"
# SageMaker runs the image with the single argument `serve`; both forms end in the same command.
COPY deploy/entrypoint.sh /usr/local/bin/nxd-entrypoint
ENTRYPOINT ["tini", "--", "nxd-entrypoint"]
CMD ["serve"]
