"""ResNet-8: a stem for 32x32 images and four basic blocks (He et al., 2016).

Modules have torchvision's names (conv1, bn1, layer1.0.conv1, ...), so its checkpoints fit.
"""

from __future__ import annotations

from torch import Tensor, nn

from fedaux.models.convolutional import ImageConvolution, Normalisation, group_norm
from fedaux.models.split import SplitModel

WIDTHS = (64, 128, 256, 512)


class BasicBlock(nn.Module):
    """relu(bn(conv(relu(bn(conv(x))))) + shortcut(x))."""

    def __init__(
        self, in_channels: int, out_channels: int, *, stride: int, norm: Normalisation
    ) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, out_channels, 3, stride=stride, padding=1, bias=False)
        self.bn1 = norm(out_channels)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, padding=1, bias=False)
        self.bn2 = norm(out_channels)
        self.relu = nn.ReLU()
        self.downsample: nn.Module | None = None
        if stride != 1 or in_channels != out_channels:
            self.downsample = nn.Sequential(
                nn.Conv2d(in_channels, out_channels, 1, stride=stride, bias=False),
                norm(out_channels),
            )

    def forward(self, inputs: Tensor) -> Tensor:
        """Map [N, C, H, W] to [N, C', H', W']."""
        shortcut = inputs if self.downsample is None else self.downsample(inputs)
        hidden = self.relu(self.bn1(self.conv1(inputs)))
        output: Tensor = self.relu(self.bn2(self.conv2(hidden)) + shortcut)
        return output


class ResNetFeatures(nn.Module):
    """The feature extractor: stem, four blocks, mean over positions."""

    def __init__(self, channels: int, *, norm: Normalisation) -> None:
        super().__init__()
        self.conv1 = ImageConvolution(channels, WIDTHS[0], 3, padding=1, bias=False)
        self.bn1 = norm(WIDTHS[0])
        self.relu = nn.ReLU()
        self.layer1 = nn.Sequential(BasicBlock(WIDTHS[0], WIDTHS[0], stride=1, norm=norm))
        self.layer2 = nn.Sequential(BasicBlock(WIDTHS[0], WIDTHS[1], stride=2, norm=norm))
        self.layer3 = nn.Sequential(BasicBlock(WIDTHS[1], WIDTHS[2], stride=2, norm=norm))
        self.layer4 = nn.Sequential(BasicBlock(WIDTHS[2], WIDTHS[3], stride=2, norm=norm))
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, inputs: Tensor) -> Tensor:
        """Map images [N, C, H, W] to features [N, 512]."""
        hidden = self.relu(self.bn1(self.conv1(inputs)))
        hidden = self.layer4(self.layer3(self.layer2(self.layer1(hidden))))
        features: Tensor = hidden.mean(dim=(2, 3))
        return features


def resnet8(image_shape: tuple[int, int, int], num_classes: int) -> SplitModel:
    """ResNet-8 with 4.9 million parameters, 19.8 MB in single precision."""
    return _resnet8(image_shape, num_classes, norm=nn.BatchNorm2d)


def resnet8_gn(image_shape: tuple[int, int, int], num_classes: int) -> SplitModel:
    """ResNet-8 with group normalisation, for differentially private training."""
    return _resnet8(image_shape, num_classes, norm=group_norm)


def _resnet8(
    image_shape: tuple[int, int, int], num_classes: int, *, norm: Normalisation
) -> SplitModel:
    features = ResNetFeatures(image_shape[0], norm=norm)
    return SplitModel(features, nn.Linear(WIDTHS[-1], num_classes), feature_width=WIDTHS[-1])
