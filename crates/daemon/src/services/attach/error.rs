//! Why a container is not attached, for all faces.

use weft_api::{ApiError, ErrorKind};
use weft_container::cni::Refusal;
use weft_kernel::KernelError;
use weft_mesh::AddressError;

/// Why a container is not attached.
#[derive(Debug, thiserror::Error)]
pub(crate) enum AttachError {
    /// It gets no address.
    #[error(transparent)]
    Address(#[from] AddressError),
    /// The kernel refuses.
    #[error(transparent)]
    Kernel(#[from] KernelError),
    /// The container's own routes hide the network.
    #[error("{0}: remove that route, or choose another range (--ipalloc-range)")]
    Hidden(String),
    /// The host's own routes and an address of `weft expose` lead to the same addresses.
    #[error("{0}: remove that route or address, or expose another address")]
    HostRoute(String),
    /// The container cannot leave the network through this host.
    #[error("{0}")]
    NoWayOut(String),
    /// The request, the disk, or a daemon that stops.
    #[error("{}", .0.error)]
    Refused(#[from] ApiError),
}

impl From<AttachError> for ApiError {
    fn from(error: AttachError) -> Self {
        let kind = match &error {
            AttachError::Address(AddressError::Taken { .. })
            | AttachError::Hidden(_)
            | AttachError::HostRoute(_)
            | AttachError::NoWayOut(_)
            | AttachError::Kernel(KernelError::DefaultRoute { .. }) => ErrorKind::Conflict,
            AttachError::Address(
                AddressError::Reserved { .. } | AddressError::NotMapped { .. },
            ) => ErrorKind::BadRequest,
            AttachError::Address(_) | AttachError::Kernel(KernelError::BridgeFull { .. }) => {
                ErrorKind::Unavailable
            }
            AttachError::Kernel(_) => ErrorKind::Internal,
            AttachError::Refused(error) => error.kind,
        };
        Self::new(kind, error)
    }
}

impl AttachError {
    /// The kind of refusal that a CNI runtime is told.
    pub(super) fn refusal(&self) -> Refusal {
        match self {
            Self::Address(AddressError::Reserved { .. } | AddressError::NotMapped { .. }) => {
                Refusal::Invalid
            }
            Self::Address(AddressError::Taken { .. } | AddressError::NoSpace { .. }) => {
                Refusal::NoAddress
            }
            Self::Address(_) | Self::Kernel(KernelError::BridgeFull { .. }) => Refusal::Busy,
            Self::Kernel(KernelError::NameTaken { .. }) => Refusal::InterfaceExists,
            Self::Kernel(
                KernelError::NamespaceGone { .. }
                | KernelError::NamespaceReplaced { .. }
                | KernelError::NamespaceIsHost { .. },
            ) => Refusal::Unknown,
            Self::Hidden(_)
            | Self::HostRoute(_)
            | Self::NoWayOut(_)
            | Self::Kernel(KernelError::DefaultRoute { .. }) => Refusal::Invalid,
            Self::Kernel(_) => Refusal::Internal,
            Self::Refused(error) => match error.kind {
                ErrorKind::BadRequest => Refusal::Invalid,
                ErrorKind::NotFound => Refusal::Unknown,
                ErrorKind::Conflict | ErrorKind::Unavailable => Refusal::Busy,
                ErrorKind::Internal => Refusal::Internal,
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_face_is_told_whose_fault_it_is() {
        let taken = || AddressError::Taken {
            address: [10, 32, 0, 9].into(),
            container: "web".into(),
            host: "one".into(),
        };
        let name_taken = || KernelError::NameTaken {
            name: "eth0".into(),
            kind: "dummy".into(),
            place: "in /run/netns/a".into(),
        };
        for (error, kind, refusal) in [
            (AttachError::from(taken()), ErrorKind::Conflict, Refusal::NoAddress),
            (AttachError::from(name_taken()), ErrorKind::Internal, Refusal::InterfaceExists),
            (AttachError::Hidden("x".into()), ErrorKind::Conflict, Refusal::Invalid),
            (
                AttachError::from(ApiError::new(ErrorKind::Unavailable, "the disk is full")),
                ErrorKind::Unavailable,
                Refusal::Busy,
            ),
        ] {
            let text = error.to_string();
            assert_eq!(error.refusal(), refusal, "{text}");
            assert_eq!(ApiError::from(error), ApiError::new(kind, text));
        }
    }
}
