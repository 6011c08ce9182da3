"""A DCGAN: transposed convolutions against strided ones, two optimizers, in fp32 with TF32 convolutions."""

import argparse

import torch
import torch.nn as nn

parser = argparse.ArgumentParser()
parser.add_argument("--batchSize", type=int, default=256)
parser.add_argument("--ngf", type=int, default=128)
opt = parser.parse_args()
nz, ngf = 100, opt.ngf


def weights_init(m):
    if m.__class__.__name__.find("Conv") != -1:
        torch.nn.init.normal_(m.weight, 0.0, 0.02)
    elif m.__class__.__name__.find("BatchNorm") != -1:
        torch.nn.init.normal_(m.weight, 1.0, 0.02)
        torch.nn.init.zeros_(m.bias)


def grow(i, o, stride=2, pad=1):
    return [nn.ConvTranspose2d(i, o, 4, stride, pad, bias=False), nn.BatchNorm2d(o), nn.ReLU(True)]


def shrink(i, o):
    return [nn.Conv2d(i, o, 4, 2, 1, bias=False), nn.BatchNorm2d(o), nn.LeakyReLU(0.2, inplace=True)]


netG = nn.Sequential(
    *grow(nz, ngf * 8, 1, 0),
    *grow(ngf * 8, ngf * 4),
    *grow(ngf * 4, ngf * 2),
    *grow(ngf * 2, ngf),
    nn.ConvTranspose2d(ngf, 3, 4, 2, 1, bias=False),
    nn.Tanh(),
).cuda()
netD = nn.Sequential(
    nn.Conv2d(3, ngf, 4, 2, 1, bias=False),
    nn.LeakyReLU(0.2, True),
    *shrink(ngf, ngf * 2),
    *shrink(ngf * 2, ngf * 4),
    *shrink(ngf * 4, ngf * 8),
    nn.Conv2d(ngf * 8, 1, 4, 1, 0, bias=False),
    nn.Sigmoid(),
).cuda()
netG.apply(weights_init)
netD.apply(weights_init)
criterion = nn.BCELoss()
optimizerD = torch.optim.Adam(netD.parameters(), lr=2e-4, betas=(0.5, 0.999))
optimizerG = torch.optim.Adam(netG.parameters(), lr=2e-4, betas=(0.5, 0.999))
for i in range(30):
    netD.zero_grad()
    real = torch.randn(opt.batchSize, 3, 64, 64).cuda()
    label = torch.full((opt.batchSize,), 1.0, device="cuda")
    errD_real = criterion(netD(real).view(-1), label)
    errD_real.backward()
    fake = netG(torch.randn(opt.batchSize, nz, 1, 1, device="cuda"))
    label.fill_(0.0)
    errD_fake = criterion(netD(fake.detach()).view(-1), label)
    errD_fake.backward()
    optimizerD.step()
    netG.zero_grad()
    label.fill_(1.0)
    errG = criterion(netD(fake).view(-1), label)
    errG.backward()
    optimizerG.step()
    if i % 10 == 0:
        print("[%d] Loss_D: %.4f Loss_G: %.4f" % (i, (errD_real + errD_fake).item(), errG.item()))
