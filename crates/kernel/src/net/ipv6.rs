//! IP settings of single devices, in any network namespace.

use std::{
    fs,
    io::{self, Write},
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    path::Path,
    sync::OnceLock,
};

use rustix::{
    fs::{Mode, OFlags, openat, statvfs},
    mount::{FsMountFlags, FsOpenFlags, MountAttrFlags, fsconfig_create, fsmount, fsopen},
};
use weft_io::namespace::{self, Namespace};

use crate::error::KernelError;

/// Settings for a device on a network where others announce routers and prefixes. It must not accept default
/// routes, addresses or redirects from them.
const NOT_TAKEN: [&str; 3] = ["accept_ra", "autoconf", "accept_redirects"];
/// The settings of devices, under `/proc`.
const SETTINGS: &str = "sys/net/ipv6/conf";
/// Those of IPv4.
const SETTINGS_IPV4: &str = "sys/net/ipv4/conf";
/// How devices ask for neighbours and answer, by IPv6.
const NEIGHBOURS: &str = "sys/net/ipv6/neigh";
/// The same by IPv4.
const NEIGHBOURS_IPV4: &str = "sys/net/ipv4/neigh";

/// Whether this kernel has IPv6 at all.
pub(crate) fn is_there() -> bool {
    Path::new("/proc/sys/net/ipv6").exists()
}

/// Why a device has no IPv6.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NoIpv6 {
    /// The kernel has none.
    Kernel,
    /// `disable_ipv6` is set for the device.
    SwitchedOff,
}

/// Whether a device in a namespace has IPv6.
///
/// # Errors
/// [`KernelError::Setting`] if the setting cannot be read.
pub(crate) fn has_ipv6(ns: &Namespace, device: &str) -> Result<Result<(), NoIpv6>, KernelError> {
    let value = in_namespace(ns, || read(device, "disable_ipv6"));
    match value {
        Ok(value) if value == "0" => Ok(Ok(())),
        Ok(_) => Ok(Err(NoIpv6::SwitchedOff)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Err(NoIpv6::Kernel)),
        Err(source) => Err(setting(device, "disable_ipv6", source)),
    }
}

/// Writes a setting of a device in a namespace, if it has another value. Does nothing on a kernel without
/// IPv6.
///
/// # Errors
/// [`KernelError::Setting`].
pub(crate) fn set(
    ns: &Namespace,
    device: &str,
    key: &'static str,
    value: &str,
) -> Result<(), KernelError> {
    in_namespace(ns, || write(device, key, value)).map_err(|source| setting(device, key, source))
}

/// Keeps a device from accepting routes and addresses from router advertisements. `place` names the device's
/// namespace. Call this before the device is up.
///
/// # Errors
/// [`KernelError::Routers`] if IPv6 is on there and the settings cannot be written.
pub(crate) fn ignore_routers(
    ns: &Namespace,
    device: &str,
    place: &Path,
) -> Result<(), KernelError> {
    let result =
        in_namespace(ns, || match NOT_TAKEN.iter().try_for_each(|key| write(device, key, "0")) {
            Err(error) if read(device, "disable_ipv6").is_ok_and(|value| value != "0") => {
                tracing::debug!(%error, device, "IPv6 is disabled there");
                Ok(())
            }
            result => result,
        });
    result.map_err(|source| KernelError::Routers {
        device: device.to_owned(),
        place: place.display().to_string(),
        source,
    })
}

/// Has a device answer ARP for its own addresses alone. By default Linux answers on each device for the addresses of
/// all, and so would tell containers where others of this host are.
///
/// # Errors
/// [`KernelError::Setting`] if the settings cannot be written.
pub(crate) fn answer_for_own_addresses(ns: &Namespace, device: &str) -> Result<(), KernelError> {
    for (key, value) in [("arp_ignore", "1"), ("arp_announce", "2")] {
        set_in(ns, SETTINGS_IPV4, device, key, value)?;
    }
    Ok(())
}

/// Has the host pass on what comes in by a device. `ipv6` says whether IPv6 packets, too.
///
/// # Errors
/// [`KernelError::Setting`] if the settings cannot be written.
pub(crate) fn forward(ns: &Namespace, device: &str, ipv6: bool) -> Result<(), KernelError> {
    set_in(ns, SETTINGS_IPV4, device, "forwarding", "1")?;
    if ipv6 { set(ns, device, "forwarding", "1") } else { Ok(()) }
}

/// Ends [`forward`] on a device: it passes on what a new device would.
///
/// # Errors
/// [`KernelError::Setting`] if the settings cannot be written.
pub(crate) fn forward_as_others(ns: &Namespace, device: &str) -> Result<(), KernelError> {
    for (settings, key) in [(SETTINGS_IPV4, "forwarding"), (SETTINGS, "forwarding")] {
        let value = in_namespace(ns, || read_in(settings, "default", key));
        // A kernel without the family has nothing to end.
        let Ok(value) = value else { continue };
        set_in(ns, settings, device, key, &value)?;
    }
    Ok(())
}

/// Has a device answer without a delay for addresses of others. By default Linux waits up to 0.8 s at random.
///
/// # Errors
/// [`KernelError::Setting`] if the settings cannot be written.
pub(crate) fn answer_at_once(ns: &Namespace, device: &str) -> Result<(), KernelError> {
    for settings in [NEIGHBOURS_IPV4, NEIGHBOURS] {
        set_in(ns, settings, device, "proxy_delay", "0")?;
    }
    Ok(())
}

fn set_in(
    ns: &Namespace,
    settings: &str,
    device: &str,
    key: &str,
    value: &str,
) -> Result<(), KernelError> {
    in_namespace(ns, || write_in(settings, device, key, value)).map_err(|source| {
        KernelError::Setting { path: format!("/proc/{settings}/{device}/{key}"), source }
    })
}

/// The host's own namespace, as `place` of [`ignore_routers`].
pub(crate) fn this_host() -> &'static Path {
    Path::new("this host")
}

fn setting(device: &str, key: &'static str, source: io::Error) -> KernelError {
    KernelError::Setting { path: format!("/proc/{SETTINGS}/{device}/{key}"), source }
}

fn in_namespace<T: Send>(
    ns: &Namespace,
    work: impl FnOnce() -> io::Result<T> + Send,
) -> io::Result<T> {
    namespace::run_in(ns, work).and_then(|result| result)
}

/// In the namespace of the calling thread.
fn read(device: &str, key: &str) -> io::Result<String> {
    read_in(SETTINGS, device, key)
}

fn read_in(settings: &str, device: &str, key: &str) -> io::Result<String> {
    Ok(fs::read_to_string(format!("/proc/{settings}/{device}/{key}"))?.trim().to_owned())
}

fn write(device: &str, key: &str, value: &str) -> io::Result<()> {
    write_in(SETTINGS, device, key, value)
}

fn write_in(settings: &str, device: &str, key: &str, value: &str) -> io::Result<()> {
    match read_in(settings, device, key) {
        Ok(present) if present == value => return Ok(()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        _ => {}
    }
    match fs::write(format!("/proc/{settings}/{device}/{key}"), value) {
        Err(error) if error.kind() == io::ErrorKind::ReadOnlyFilesystem => {
            write_beside(settings, device, key, value).map_err(|_| error)
        }
        result => result,
    }
}

/// The process file system, mounted once more where `/proc/sys` is read-only.
static WRITABLE: OnceLock<OwnedFd> = OnceLock::new();

/// Prepares to write settings where `/proc/sys` is mounted read-only, as in most containers. The file system
/// itself still accepts settings from a process that may mount it. Only used for Weft's devices. The mount
/// is not attached anywhere and ends with this process. Call it before the process drops the right to mount.
pub fn open_settings() {
    let is_read_only = statvfs("/proc/sys")
        .is_ok_and(|found| found.f_flag.contains(rustix::fs::StatVfsMountFlags::RDONLY));
    if !is_read_only || WRITABLE.get().is_some() {
        return;
    }
    match mount_proc() {
        Ok(mount) => _ = WRITABLE.set(mount),
        Err(error) => tracing::warn!(%error, "/proc/sys is read-only and cannot be remounted"),
    }
}

/// The mount that [`open_settings`] has made, if it had to.
pub fn settings_mount() -> Option<BorrowedFd<'static>> {
    WRITABLE.get().map(AsFd::as_fd)
}

fn write_beside(settings: &str, device: &str, key: &str, value: &str) -> io::Result<()> {
    let proc = WRITABLE.get().ok_or(io::ErrorKind::ReadOnlyFilesystem)?;
    let path = format!("{settings}/{device}/{key}");
    let file = openat(proc, path, OFlags::WRONLY | OFlags::CLOEXEC, Mode::empty())?;
    fs::File::from(file).write_all(value.as_bytes())
}

fn mount_proc() -> io::Result<OwnedFd> {
    let context = fsopen("proc", FsOpenFlags::FSOPEN_CLOEXEC)?;
    fsconfig_create(context.as_fd())?;
    Ok(fsmount(context.as_fd(), FsMountFlags::FSMOUNT_CLOEXEC, MountAttrFlags::empty())?)
}
