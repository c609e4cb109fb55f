from p2ptrain.cluster.client import AsyncClient as AsyncClient
from p2ptrain.cluster.client import Client as Client
from p2ptrain.cluster.local_cluster import LocalCluster as LocalCluster
from p2ptrain.core.errors import ConfigError as ConfigError
from p2ptrain.core.errors import ConnectionLost as ConnectionLost
from p2ptrain.core.errors import DeadlineExceeded as DeadlineExceeded
from p2ptrain.core.errors import JobFailed as JobFailed
from p2ptrain.core.errors import NetworkError as NetworkError
from p2ptrain.core.errors import P2PTrainError as P2PTrainError
from p2ptrain.core.errors import PeerError as PeerError
from p2ptrain.core.errors import Refused as Refused
from p2ptrain.core.errors import ResourceError as ResourceError
from p2ptrain.core.errors import StorageError as StorageError
from p2ptrain.core.errors import Unreachable as Unreachable
from p2ptrain.core.errors import UserError as UserError
from p2ptrain.python.training import TrainingResult as TrainingResult
from p2ptrain.python.training import train as train

__version__: str
