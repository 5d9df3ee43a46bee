"""The official files of each data set: names, sizes, addresses, hashes. Data, not code."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class IdxFile:
    """One idx file.

    `sha256` is that of the .gz as it is downloaded. `content` is the SHA-256 of the array's bytes, by which a file
    packed differently, or not at all, is still known to be the official one; None: not compared.
    """

    name: str
    shape: tuple[int, ...]
    sha256: str
    content: str | None = None


@dataclass(frozen=True)
class IdxSource:
    """A data set in four idx files. A file is looked for in each of `folders` under `$TORCHACE_DATA`."""

    name: str
    title: str
    class_names: tuple[str, ...]
    folders: tuple[str, ...]
    urls: tuple[str, ...]
    train: tuple[IdxFile, IdxFile]  # images, labels
    test: tuple[IdxFile, IdxFile]


@dataclass(frozen=True)
class CifarSource:
    """CIFAR-10 in six batches of `count` images; training batches first, the test batch last."""

    name: str
    title: str
    class_names: tuple[str, ...]
    folders: tuple[str, ...]
    urls: tuple[str, ...]
    archive: str
    sha256: str  # of the archive
    count: int
    binary: dict[str, str] = field(repr=False)  # file in the binary version: SHA-256
    python: dict[str, str] = field(repr=False)  # file in the Python version: MD5, as published


MNIST = IdxSource(
    name="mnist",
    title="MNIST",
    class_names=tuple("0123456789"),
    folders=("mnist", "MNIST/raw", "MNIST", "."),
    urls=(
        "https://ossci-datasets.s3.amazonaws.com/mnist/",
        "https://storage.googleapis.com/cvdf-datasets/mnist/",
    ),
    train=(
        IdxFile(
            "train-images-idx3-ubyte",
            (60_000, 28, 28),
            "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
            "741c988805d008ac6e4c904b69001ba184c24b2c540a4ef403f4c71b676cf757",
        ),
        IdxFile(
            "train-labels-idx1-ubyte",
            (60_000,),
            "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
            "1feba77c54802fa5339a11837ea4b2866434b83314ec45192930f1df69120c13",
        ),
    ),
    test=(
        IdxFile(
            "t10k-images-idx3-ubyte",
            (10_000, 28, 28),
            "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
            "6d87418db22cc8025d05968bec9bd5c3932904b23485740db143a061a2c9d161",
        ),
        IdxFile(
            "t10k-labels-idx1-ubyte",
            (10_000,),
            "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
            "ddeff807876a9661a1110d45c266c86239a3a1b7d37da0c3716a7a683c852ff5",
        ),
    ),
)

FASHION_MNIST = IdxSource(
    name="fashion_mnist",
    title="Fashion-MNIST",
    class_names=(
        "T-shirt/top",
        "Trouser",
        "Pullover",
        "Dress",
        "Coat",
        "Sandal",
        "Shirt",
        "Sneaker",
        "Bag",
        "Ankle boot",
    ),
    folders=("fashion_mnist", "fashion-mnist", "FashionMNIST/raw", "FashionMNIST", "."),
    urls=(
        "https://github.com/zalandoresearch/fashion-mnist/raw/master/data/fashion/",
        "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
    ),
    train=(
        IdxFile(
            "train-images-idx3-ubyte",
            (60_000, 28, 28),
            "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
            "2e487a6c89124f78f2d7521542223cafe96f7123c3ca13d447772ac6ecbb3012",
        ),
        IdxFile(
            "train-labels-idx1-ubyte",
            (60_000,),
            "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
            "657fbd221bfc9f4198cc14b5619cc33ec57c58dd0e47af4d99d6650759e869a7",
        ),
    ),
    test=(
        IdxFile(
            "t10k-images-idx3-ubyte",
            (10_000, 28, 28),
            "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
            "c867c93ff95360594e8ec3287995350b824dd110b11595c0e13d5423f621867a",
        ),
        IdxFile(
            "t10k-labels-idx1-ubyte",
            (10_000,),
            "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
            "3d0e6c6ea990b53b6f8f500a41cac93881d981b315f84578b7d915342ade01e9",
        ),
    ),
)

CIFAR10 = CifarSource(
    name="cifar10",
    title="CIFAR-10",
    class_names=("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
    folders=("cifar10", "cifar-10", "CIFAR10", "."),
    urls=("https://www.cs.toronto.edu/~kriz/",),
    archive="cifar-10-binary.tar.gz",
    sha256="c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
    count=10_000,
    binary={
        "data_batch_1.bin": "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5",
        "data_batch_2.bin": "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed",
        "data_batch_3.bin": "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67",
        "data_batch_4.bin": "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48",
        "data_batch_5.bin": "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add",
        "test_batch.bin": "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b",
    },
    python={
        "data_batch_1": "c99cafc152244af753f735de768cd75f",
        "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
        "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
        "data_batch_4": "634d18415352ddfa80567beed471001a",
        "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
        "test_batch": "40351d587109b95175f43aff81a1287e",
    },
)

SOURCES: dict[str, IdxSource | CifarSource] = {source.name: source for source in (MNIST, FASHION_MNIST, CIFAR10)}
