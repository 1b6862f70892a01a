"""Plain torch models of any size, and `load_model`: from a model reference to a module with its batch and loss."""

from meshwright.zoo.bert import BERT, BERTShape
from meshwright.zoo.diffusion import DDPM, DDPMShape
from meshwright.zoo.dlrm import DLRM, DLRMShape
from meshwright.zoo.gnmt import GNMT, GNMTShape
from meshwright.zoo.gpt import GPT, GPTShape
from meshwright.zoo.llama import Llama, LlamaShape
from meshwright.zoo.lora import LoRAShape
from meshwright.zoo.mixtral import Mixtral, MixtralShape
from meshwright.zoo.references import load_model
from meshwright.zoo.resnet import ResNet, ResNetShape
from meshwright.zoo.shape_files import Shape, load_shape, zoo_names
from meshwright.zoo.source import ModelSource
from meshwright.zoo.t5 import T5, T5Shape
from meshwright.zoo.unet import UNet, UNetShape
from meshwright.zoo.vgg import VGG, VGGShape

__all__ = [
    "BERT",
    "DDPM",
    "DLRM",
    "GNMT",
    "GPT",
    "T5",
    "VGG",
    "BERTShape",
    "DDPMShape",
    "DLRMShape",
    "GNMTShape",
    "GPTShape",
    "Llama",
    "LlamaShape",
    "LoRAShape",
    "Mixtral",
    "MixtralShape",
    "ModelSource",
    "ResNet",
    "ResNetShape",
    "Shape",
    "T5Shape",
    "UNet",
    "UNetShape",
    "VGGShape",
    "load_model",
    "load_shape",
    "zoo_names",
]
