"""What a model trained here should cite, as BibTeX."""

SPARROW = """\
@article{zhou2026sparrow,
  title   = {Sparrow: Sparse Rollout for Stable and Efficient Long-context RL of Large Language Models},
  author  = {Zhou and others},
  journal = {arXiv preprint arXiv:2606.08446},
  year    = {2026}
}"""

TRL = """\
@software{vonwerra2020trl,
  title   = {{TRL: Transformers Reinforcement Learning}},
  author  = {von Werra, Leandro and Belkada, Younes and Tunstall, Lewis and Beeching, Edward and Thrush, Tristan and Lambert, Nathan and Huang, Shengyi and Rasul, Kashif and Gallou{\\'e}dec, Quentin},
  license = {Apache-2.0},
  url     = {https://github.com/huggingface/trl},
  year    = {2020}
}"""

GRPO = """\
@article{shao2024deepseekmath,
  title   = {{DeepSeekMath: Pushing the Limits of Mathematical Reasoning in Open Language Models}},
  author  = {Zhihong Shao and Peiyi Wang and Qihao Zhu and Runxin Xu and Junxiao Song and Mingchuan Zhang and Y. K. Li and Y. Wu and Daya Guo},
  journal = {arXiv preprint arXiv:2402.03300},
  year    = {2024}
}"""

CITATIONS = "\n\n".join((SPARROW, TRL, GRPO))
