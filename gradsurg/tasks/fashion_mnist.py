"""Fashion-MNIST: 70,000 pieces of clothing of 28 x 28 pixels, from files."""

from collections.abc import Sequence
from pathlib import Path

from gradsurg.plugins.fields import validated
from gradsurg.tasks.base import Classification, Data
from gradsurg.tasks.data.arrays import Count, Seed
from gradsurg.tasks.data.images import Layout, image_files, read_images

LAYOUT = Layout(
    name="fashion-mnist",
    title="Fashion-MNIST",
    folder="FashionMNIST",
    npz="fashion_mnist.npz",
    address="http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
    algorithm="md5",
    hashes=(
        "f4a8712d7a061bf5bd6d2ca38dc4d50a",
        "9018921c3c673c538a1fc5bad174d6f9",
        "8181f5470baa50b63fa0f6fddb340f0a",
        "15d484375f8d13e6eb1aabb0c3f46965",
    ),
)


@validated
class FashionMNIST(Classification):
    """Classify clothing (Xiao et al. 2017, arXiv 1708.07747) by cross-entropy; from files.

    `root` is the folder with the four files, or torchvision's folder around it, or a folder with
    fashion_mnist.npz. Without it the files are read that `python -m gradsurg.tasks.fetch
    fashion-mnist` put into the user's cache folder. With `verify` files that are not the published
    ones are refused. `num_train` and `num_test` are sizes of subsets chosen by `split_seed`; null
    means all examples.
    """

    root: str | None = None
    num_train: Count | None = None
    num_test: Count | None = None
    split_seed: Seed = 0
    verify: bool = True

    def load(self) -> Data:
        images = read_images(LAYOUT, self.root, self.verify, self.content)
        return images.data(self.num_train, self.num_test, self.split_seed)

    def files(self) -> Sequence[Path]:
        # verified files have a fixed content
        return () if self.verify else image_files(LAYOUT, self.root)
