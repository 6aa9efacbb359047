"""Installs megatron_nb, its kernels (nb_kernels) and its stage files. Extras: gpu, tune, lm_eval, dev.

vLLM has an environment of its own: tools/serve_venv.sh.
"""
from setuptools import find_packages, setup

setup(
    name="megatron_nb",
    version="0.1.0",
    description="Post-training of small language models on Megatron-Core: SFT, reward models, RL, agents",
    python_requires=">=3.12,<3.14",
    packages=find_packages(include=["megatron_nb", "megatron_nb.*"])
    + find_packages("kernels", include=["nb_kernels", "nb_kernels.*"])
    + ["hydra_conf"],
    package_dir={"nb_kernels": "kernels/nb_kernels"},
    package_data={"hydra_conf": ["*.yaml", "*/*.yaml"]},
    install_requires=[
        "torch>=2.14,<2.15",
        "megatron-core==0.19.2",  # parallel/cpu.py patches symbols of exactly this release and asserts that they exist
        "transformers>=5.24,<6",
        "gguf>=0.19",
        "httpx>=0.28,<1",
        "math-verify[antlr4_9_3]>=0.9,<1",  # Hydra needs this release of antlr too
        "text2num>=3.1,<4",  # numbers in words, where answers are compared
        "python-dateutil>=2.9",  # dates likewise
        "jsonschema>=4.23",  # arguments of tool calls
        "langdetect>=1.0.9,<2",  # languages of answers, in instruction following
        "markdown-it-py>=3",  # reports of stages, on the report page
        "mwparserfromhell>=0.7,<1",  # wikitext
        "tantivy>=0.26,<1",  # the search index
        "jinja2",  # the script for Slurm
        "hydra-core>=1.3.2,<1.4",
        "wandb>=0.31",
        "nvidia-dali-cuda130>=2.4,<3",  # its CPU pipelines need no GPU
        "safetensors>=0.5",
        "numpy",
        "pyarrow",
        "rich>=13",
        "matplotlib>=3.9",
        "psutil",
    ],
    extras_require={
        "gpu": ["transformer-engine[pytorch,core-cu13]>=2.19,<2.21", "flash-attn>=2.8,<3"],
        "tune": ["optuna>=5,<6"],  # tools/tune.py
        "lm_eval": ["lm-eval[api]>=0.4.9,<0.5"],  # the bridge of megatron_nb/evals/lm_eval.py
        "dev": ["pytest>=8.3", "pytest-timeout>=2.3", "pytest-xdist>=3.6", "ruff>=0.14", "trl>=1.16,<2", "hypothesis>=6.100",
                "optuna>=5,<6", "bm25s>=0.3", "rank_bm25>=0.2.2"],
    },
)
