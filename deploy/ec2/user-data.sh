#!/bin/bash
# User data of an Inf2 or Trn1 instance with Ubuntu 22.04 or 24.04 (or AWS' Neuron AMI of it): installs the driver and
# Docker, and runs the server on every Neuron device of the instance. Change the five lines below; the rest fits both.
# UNVERIFIED: never run on such an instance. Its log is /var/log/cloud-init-output.log.
set -euo pipefail

IMAGE=123456789012.dkr.ecr.us-east-1.amazonaws.com/nxd-infer:neuron
MODEL=s3://my-bucket/my-model # an artifact, or a Hugging Face model directory, which is traced here at the first start
TARGET=inf2                   # or trn1
TP=2                          # Inf2: 1, 2, 4, 8, 12 or 24; Trn1: 1, 2, 8 or 32; a device has two cores
REGION=us-east-1

DRIVER='2.29.0.*' # aws-neuronx-dkms of Neuron SDK 2.31.0, the one of the image
DEVICES=/dev/neuron
FOLDER=/var/lib/nxd-infer

install_driver() {
    curl -fsSL --retry 5 https://apt.repos.neuron.amazonaws.com/GPG-PUB-KEY-AMAZON-AWS-NEURON.PUB |
        gpg --dearmor --yes -o /usr/share/keyrings/neuron.gpg
    echo "deb [signed-by=/usr/share/keyrings/neuron.gpg] https://apt.repos.neuron.amazonaws.com jammy main" \
        >/etc/apt/sources.list.d/neuron.list
    apt-get update
    apt-get install -y "linux-headers-$(uname -r)" "aws-neuronx-dkms=$DRIVER"
    modprobe neuron
}

export DEBIAN_FRONTEND=noninteractive
[ -e "${DEVICES}0" ] || install_driver
devices=()
for device in "$DEVICES"[0-9]*; do
    [ -e "$device" ] && devices+=(--device "$device")
done
if [ ${#devices[@]} -eq 0 ]; then
    echo "error: there is no ${DEVICES}0 after the driver was installed: is this an Inf2 or Trn1 instance?" >&2
    exit 1
fi
command -v docker >/dev/null || { apt-get update && apt-get install -y docker.io; }

if [[ $IMAGE == *.dkr.ecr.* ]]; then
    command -v aws >/dev/null || snap install aws-cli --classic
    aws ecr get-login-password --region "$REGION" | docker login --username AWS --password-stdin "${IMAGE%%/*}"
fi

install -d -m 0700 /etc/nxd-infer
[ -e /etc/nxd-infer/keys ] || (umask 077 && echo "NXD_INFER_API_KEYS=$(openssl rand -hex 16)" >/etc/nxd-infer/keys)
install -d -o 10001 -g 10001 "$FOLDER" # the user of the image

docker rm -f nxd-infer >/dev/null 2>&1 || true
docker run --detach --name nxd-infer --restart unless-stopped --publish 8080:8080 "${devices[@]}" \
    --read-only --tmpfs /tmp --cap-drop ALL --security-opt no-new-privileges --stop-timeout 45 \
    --volume "$FOLDER:/var/lib/nxd-infer" --env-file /etc/nxd-infer/keys --env AWS_DEFAULT_REGION="$REGION" \
    --env NXD_INFER_ARTIFACT="$MODEL" --env NXD_INFER_TRACE_OPTIONS="--backend neuron --target $TARGET --tp $TP" \
    "$IMAGE" serve
