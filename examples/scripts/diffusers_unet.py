"""Text-to-image training with diffusers: a UNet with cross attention, a noise scheduler, weights by signal to noise."""

import argparse

import torch
import torch.nn.functional as F
from diffusers import DDPMScheduler, UNet2DConditionModel
from diffusers.optimization import get_scheduler
from diffusers.training_utils import EMAModel, compute_snr

parser = argparse.ArgumentParser()
parser.add_argument("--train_batch_size", type=int, default=8)
parser.add_argument("--resolution", type=int, default=256)
parser.add_argument("--use_ema", action="store_true")
parser.add_argument("--gradient_checkpointing", action="store_true")
args = parser.parse_args()

unet = UNet2DConditionModel(
    sample_size=args.resolution // 8,
    block_out_channels=(192, 384, 768),
    down_block_types=("CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D"),
    up_block_types=("UpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D"),
    cross_attention_dim=768,
).cuda()
if args.gradient_checkpointing:
    unet.enable_gradient_checkpointing()
noise_scheduler = DDPMScheduler(num_train_timesteps=1000, beta_schedule="scaled_linear")
ema_unet = EMAModel(unet.parameters()) if args.use_ema else None
optimizer = torch.optim.AdamW(unet.parameters(), lr=1e-4, weight_decay=1e-2)
lr_scheduler = get_scheduler("constant_with_warmup", optimizer, num_warmup_steps=500)
size = args.resolution // 8
unet.train()
for step in range(20):
    latents = torch.randn(args.train_batch_size, 4, size, size, device="cuda")
    prompts = torch.randn(args.train_batch_size, 77, 768, device="cuda")
    noise = torch.randn_like(latents)
    timesteps = torch.randint(0, 1000, (args.train_batch_size,), device="cuda").long()
    noisy = noise_scheduler.add_noise(latents, noise, timesteps)
    with torch.autocast("cuda", dtype=torch.float16):
        pred = unet(noisy, timesteps, prompts).sample
    snr = compute_snr(noise_scheduler, timesteps)
    weights = torch.stack([snr, 5.0 * torch.ones_like(timesteps)], dim=1).min(dim=1)[0] / snr
    loss = (F.mse_loss(pred.float(), noise, reduction="none").mean(dim=(1, 2, 3)) * weights).mean()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(unet.parameters(), 1.0)
    optimizer.step()
    lr_scheduler.step()
    optimizer.zero_grad(set_to_none=True)
    if ema_unet is not None:
        ema_unet.step(unet.parameters())
    if step % 10 == 0:
        print(step, loss.item())
