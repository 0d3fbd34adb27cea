"""Llama through PyTorch Lightning."""

import argparse
import os

import modeling_llama_nxd as modeling
import torch
import torch_xla.core.xla_model as xm
from common import add_common_arguments, create_dataloader, full_state, get_linear_schedule_with_warmup, print_losses
from lightning.pytorch import LightningDataModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from neuronx_distributed import neuronx_distributed_config
from neuronx_distributed.lightning import (
    NeuronHooksCallback,
    NeuronLTModule,
    NeuronTensorBoardLogger,
    NeuronTQDMProgressBar,
    NeuronXLAPrecisionPlugin,
    NeuronXLAStrategy,
)
from neuronx_distributed.parallel_layers import checkpointing, parallel_state
from neuronx_distributed.trainer import initialize_parallel_optimizer
from neuronx_distributed.utils.adamw_fp32_optim_params import AdamW_FP32OptimParams
from transformers import LlamaForCausalLM


class NeuronLlamaLTModule(NeuronLTModule):
    def training_step(self, batch, batch_idx):
        xm.mark_step()
        for logger in self.trainer.loggers:
            logger.print_step = -1
        self.should_print = False
        loss = self.model(input_ids=batch["input_ids"], labels=batch["labels"]) / self.grad_accum_steps
        loss.backward()
        self.averaged_loss += loss.detach()
        xm.mark_step()
        if not self.automatic_optimization and (batch_idx + 1) % self.grad_accum_steps == 0:
            self.should_print = True
            loss_div = self.averaged_loss / self.trainer.strategy.data_parallel_size
            loss_reduced = xm.all_reduce(
                xm.REDUCE_SUM, loss_div, groups=parallel_state.get_data_parallel_group(as_list=True)
            )
            self.loss = loss_reduced.detach().clone()
            self.averaged_loss.zero_()
            optimizer, scheduler = self.optimizers(), self.lr_schedulers()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            xm.mark_step()
            self.losses = [*getattr(self, "losses", []), self.loss]
            for logger in self.trainer.loggers:
                logger.print_step = self.global_step
        return loss

    def configure_optimizers(self):
        optimizer = initialize_parallel_optimizer(
            self.nxd_config, self.opt_cls, self.get_param_groups_by_weight_decay(), **self.opt_kwargs
        )
        optimizer.zero_grad()
        scheduler = self.scheduler_cls(optimizer, *self.scheduler_args, **self.scheduler_kwargs)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    def on_train_batch_end(self, *args, **kwargs):
        if self.should_print:
            self.log("loss", self.loss.item(), prog_bar=True)
            self.log("lr", self.lr_schedulers().get_last_lr()[0])


class LlamaDataModule(LightningDataModule):
    def __init__(self, args):
        super().__init__()
        self.args = args

    def train_dataloader(self):
        strategy = self.trainer.strategy
        return create_dataloader(self.args, strategy.data_parallel_size, strategy.data_parallel_rank)


def get_model(args):
    config = modeling.get_config()
    model = modeling.LlamaForCausalLM(config)
    path = os.path.join(args.output_dir, f"pretrained_{xm.get_ordinal()}.pt")
    os.makedirs(args.output_dir, exist_ok=True)
    torch.save(modeling.convert_from_hf(full_state(args, LlamaForCausalLM, config)), path)
    checkpointing.load(path, model=model, sharded=False)
    return model


def train_llama(args):
    nxd_config = neuronx_distributed_config(
        tensor_parallel_size=args.tensor_parallel_size,
        optimizer_config={"zero_one_enabled": True, "grad_clipping": True, "max_grad_norm": 1.0},
    )
    model = NeuronLlamaLTModule(
        model_fn=get_model,
        nxd_config=nxd_config,
        model_args=(args,),
        opt_cls=AdamW_FP32OptimParams,
        scheduler_cls=get_linear_schedule_with_warmup,
        opt_kwargs={"lr": args.lr},
        scheduler_args=(args.warmup_steps, args.max_steps),
        grad_accum_steps=args.grad_accum_usteps,
        train_batch_size=args.batch_size,
        logging_interval=1,
        log_rank0=False,
        manual_opt=True,
    )
    checkpoints = os.path.join(args.output_dir, "ckpts")
    trainer = Trainer(
        strategy=NeuronXLAStrategy(nxd_config=nxd_config, save_load_xser=True),
        plugins=[NeuronXLAPrecisionPlugin()],
        callbacks=[
            NeuronTQDMProgressBar(),
            NeuronHooksCallback(),
            ModelCheckpoint(dirpath=checkpoints, filename="{step}", every_n_train_steps=args.max_steps),
        ],
        logger=NeuronTensorBoardLogger(save_dir=os.path.join(args.output_dir, "logs"), log_rank0=False),
        max_steps=args.max_steps,
        limit_val_batches=0,
        log_every_n_steps=1,
        use_distributed_sampler=False,
        enable_model_summary=False,
    )
    trainer.fit(model=model, datamodule=LlamaDataModule(args))
    print_losses(model.losses)


if __name__ == "__main__":
    parser = add_common_arguments(argparse.ArgumentParser())
    parser.add_argument("--grad_accum_usteps", type=int, default=1)
    train_llama(parser.parse_args())
