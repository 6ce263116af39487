#!/usr/bin/env bash
# SSPO on Qwen2.5-Math-1.5B (arXiv 2511.04256) in verl, on 8 GPUs.
#
# The numbers are those of the recipe sspo-qwen2.5-math-1.5b.toml, which says where each comes from.
# Cut for one node of 8 GPUs with 80 GB.
# Start Ray on the nodes first, and run this on the head; what follows the command is handed on to verl:
#   TRAIN=train.parquet VAL=aime24.parquet OUT=/shared/run bash scripts/verl/sspo_qwen2.5_math_1.5b.sh trainer.nnodes=4
# The files are in verl's schema, one row per problem, and every prompt ends with the recipe's suffix (docs/verl.md).
set -euo pipefail

: "${TRAIN:?a parquet file in the schema of verl}" "${OUT:?a folder that all nodes see}"
VAL="${VAL:-$TRAIN}"
MODEL="${MODEL:-Qwen/Qwen2.5-Math-1.5B}"

exec "${PYTHON:-python3}" -m verl.trainer.main_ppo \
  trainer.v1.trainer_mode=trimtab \
  +trimtab.objective=sspo \
  +trimtab.widen_low=0.5 \
  +trimtab.widen_high=1.5 \
  "+trimtab.record=$OUT/record" \
  +trimtab.record_every=10 \
  +trimtab.record_group_share=0.05 \
  algorithm.adv_estimator=grpo \
  algorithm.norm_adv_by_std_in_grpo=True \
  algorithm.use_kl_in_reward=False \
  "data.train_files=$TRAIN" \
  "data.val_files=$VAL" \
  data.train_batch_size=256 \
  data.max_prompt_length=1024 \
  data.max_response_length=3072 \
  data.filter_overlong_prompts=True \
  data.truncation=error \
  data.return_raw_chat=True \
  "actor_rollout_ref.model.path=$MODEL" \
  actor_rollout_ref.model.use_remove_padding=True \
  actor_rollout_ref.model.enable_gradient_checkpointing=True \
  actor_rollout_ref.actor.strategy=fsdp2 \
  actor_rollout_ref.actor.ppo_mini_batch_size=64 \
  actor_rollout_ref.actor.ppo_epochs=1 \
  actor_rollout_ref.actor.shuffle=False \
  actor_rollout_ref.actor.use_dynamic_bsz=True \
  actor_rollout_ref.actor.ppo_max_token_len_per_gpu=32768 \
  actor_rollout_ref.actor.use_kl_loss=False \
  actor_rollout_ref.actor.entropy_coeff=0 \
  actor_rollout_ref.actor.optim.clip_grad=1.0 \
  actor_rollout_ref.actor.optim.lr=1e-06 \
  actor_rollout_ref.actor.optim.lr_scheduler_type=constant \
  actor_rollout_ref.actor.optim.lr_warmup_steps=10 \
  actor_rollout_ref.actor.optim.weight_decay=0.0 \
  actor_rollout_ref.rollout.name=vllm \
  actor_rollout_ref.rollout.n=8 \
  actor_rollout_ref.rollout.temperature=1.0 \
  actor_rollout_ref.rollout.top_p=1.0 \
  actor_rollout_ref.rollout.tensor_model_parallel_size=1 \
  actor_rollout_ref.rollout.gpu_memory_utilization=0.7 \
  actor_rollout_ref.rollout.calculate_log_probs=True \
  actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=True \
  actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=65536 \
  reward.custom_reward_function.path=pkg://trimtab.engines.verl.reward \
  reward.custom_reward_function.name=compute_score \
  +reward.custom_reward_function.reward_kwargs.rule=math \
  +reward.custom_reward_function.reward_kwargs.correct=1.0 \
  +reward.custom_reward_function.reward_kwargs.wrong=-1.0 \
  trainer.nnodes=1 \
  trainer.n_gpus_per_node=8 \
  trainer.total_training_steps=1000 \
  trainer.total_epochs=1000 \
  trainer.save_freq=20 \
  trainer.max_actor_ckpt_to_keep=2 \
  trainer.test_freq=-1 \
  trainer.val_before_train=False \
  trainer.resume_mode=auto \
  "trainer.default_local_dir=$OUT/checkpoints" \
  trainer.project_name=trimtab \
  trainer.experiment_name=sspo_qwen2.5_math_1.5b \
  "trainer.logger=[console,file]" \
  "$@"
