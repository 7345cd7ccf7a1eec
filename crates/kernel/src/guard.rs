//! stub
use crate::KernelError;
use std::collections::BTreeSet;
use std::net::IpAddr;
#[derive(Clone, Debug, Default)]
pub struct GuardCounters;
impl GuardCounters {
    pub fn named(&self) -> Vec<(&'static str, u64)> {
        vec![]
    }
}
pub struct Guard;
pub struct GuardWatch;
impl Guard {
    pub fn new() -> Self {
        Guard
    }
    pub fn watch(&self) -> Result<GuardWatch, KernelError> {
        Ok(GuardWatch)
    }
    pub async fn ensure(&self, _: &BTreeSet<IpAddr>) -> Result<(), KernelError> {
        Ok(())
    }
    pub async fn is_whole(&self, _: &BTreeSet<IpAddr>) -> Result<bool, KernelError> {
        Ok(true)
    }
    pub async fn remove(&self) -> Result<(), KernelError> {
        Ok(())
    }
    pub async fn counters(&self) -> Result<GuardCounters, KernelError> {
        Ok(GuardCounters)
    }
}
impl GuardWatch {
    pub async fn changed(&mut self) -> Result<(), KernelError> {
        std::future::pending().await
    }
}
