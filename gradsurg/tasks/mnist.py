"""MNIST: 70,000 handwritten digits of 28 x 28 pixels, from files."""

from collections.abc import Sequence
from pathlib import Path

from gradsurg.plugins.fields import validated
from gradsurg.tasks.base import Classification, Data
from gradsurg.tasks.data.arrays import Count, Seed
from gradsurg.tasks.data.images import Layout, image_files, read_images

LAYOUT = Layout(
    name="mnist",
    title="MNIST",
    folder="MNIST",
    npz="mnist.npz",
    address="https://ossci-datasets.s3.amazonaws.com/mnist/",
    algorithm="sha256",
    hashes=(
        "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
        "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
        "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
        "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
    ),
)


@validated
class MNIST(Classification):
    """Classify handwritten digits (LeCun et al. 1998) by cross-entropy; from files.

    `root` is the folder with the four files, or torchvision's folder around it, or a folder with
    Keras's mnist.npz. Without it the files are read that `python -m gradsurg.tasks.fetch mnist` put
    into the user's cache folder. With `verify` files that are not the published ones are refused.
    `num_train` and `num_test` are sizes of subsets chosen by `split_seed`; null means all examples.
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
