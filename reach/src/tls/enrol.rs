//! Enrolment and renewal: the first credentials for a token, the next ones for the present ones.
//! They include the authority to trust from then on: the same one, or a successor that it vouches
//! for. Another authority is refused, whoever presents it.

use std::{path::Path, sync::Arc};

use fs_mapper::config::TlsHost;
use posh_proto::{
    executor::{EnrolRequest, IssuedCertificate, RenewRequest, enrolment_client::EnrolmentClient},
    token::{Fingerprint, Token},
    untrusted::escaped,
};
use rcgen::{CertificateParams, KeyPair};
use tonic::{Status, transport::Channel};

use super::{TlsFault, credentials::Credentials, handshake, over, trust};

/// Generates a key, has the executor sign it and stores both in the file `path`. The token's secret
/// is sent only to an executor whose authority the token names.
///
/// # Errors
/// [`TlsFault`]; nothing is stored then.
pub async fn enrol(host: &TlsHost, token: &Token, path: &Path) -> Result<Credentials, TlsFault> {
    let stream = handshake(host, Arc::new(trust::config_for(token.authority)?)).await?;
    let channel = over(stream, host, path, None).await?;
    let (key, signing_request) = request()?;
    let secret = token.secret.to_vec().into();
    let request = EnrolRequest { secret, signing_request: signing_request.into() };
    let issued = EnrolmentClient::new(channel)
        .enrol(request)
        .await
        .map_err(|status| refused(&status))?
        .into_inner();
    if !Fingerprint::of(&issued.authority).is(&token.authority) {
        return Err(TlsFault::Refused(
            "the executor answered with another authority than the token's".to_owned(),
        ));
    }
    let issued = with_authority_after(&issued.authority.clone(), issued)?;
    // After another enrolment at the same server, the data that is kept of it stays usable.
    let is_same =
        |present: &Credentials| with_authority_after(&present.authority, issued.clone()).is_ok();
    let same = Credentials::load(path, host).ok().filter(is_same);
    keep(key, issued, path, same.map(|present| present.server()))
}

/// Renews the credentials over a connection that uses the present ones, and stores them.
///
/// # Errors
/// [`TlsFault`]; the present ones stay then.
pub async fn renew(channel: Channel, host: &TlsHost, path: &Path) -> Result<Credentials, TlsFault> {
    let present = Credentials::load(path, host)?;
    let (key, signing_request) = request()?;
    let request = RenewRequest { signing_request: signing_request.into() };
    let issued = EnrolmentClient::new(channel)
        .renew(request)
        .await
        .map_err(|status| refused(&status))?
        .into_inner();
    let issued = with_authority_after(&present.authority, issued)?;
    keep(key, issued, path, Some(present.server()))
}

/// Returns `issued` with the authority to trust from now on: the `known` one, or a successor that
/// it vouches for.
fn with_authority_after(
    known: &[u8],
    issued: IssuedCertificate,
) -> Result<IssuedCertificate, TlsFault> {
    let IssuedCertificate { authority, next_authority, .. } = &issued;
    let newest = if next_authority.is_empty() { authority } else { next_authority }.clone();
    if newest != known && !trust::vouches(known, &newest, &issued.certificate) {
        let why = "the executor answered with another authority, \
                   for which the one that it had does not vouch";
        return Err(TlsFault::Refused(why.to_owned()));
    }
    Ok(IssuedCertificate { authority: newest, ..issued })
}

fn keep(
    key: KeyPair,
    issued: IssuedCertificate,
    path: &Path,
    server: Option<String>,
) -> Result<Credentials, TlsFault> {
    let credentials = Credentials { server, ..Credentials::new(key.serialize_pem(), issued) };
    // Unusable credentials must not replace usable ones.
    trust::config_of(&credentials, path)?;
    credentials.save(path)?;
    Ok(credentials)
}

fn request() -> Result<(KeyPair, Vec<u8>), TlsFault> {
    let failed = |error: rcgen::Error| TlsFault::Setup(error.to_string());
    let key = KeyPair::generate().map_err(failed)?;
    let request = CertificateParams::default().serialize_request(&key).map_err(failed)?;
    Ok((key, request.der().to_vec()))
}

fn refused(status: &Status) -> TlsFault {
    TlsFault::Refused(escaped(status.message()).into_owned())
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use rcgen::{BasicConstraints, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer};

    use super::*;

    /// Authorities all have the same name.
    fn authority() -> (CertificateParams, KeyPair) {
        let mut params = CertificateParams::default();
        params.distinguished_name.push(DnType::CommonName, "posh executor authority");
        params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        (params, KeyPair::generate().expect("a key"))
    }

    fn signed(
        params: &CertificateParams,
        key: &KeyPair,
        by: &(CertificateParams, KeyPair),
    ) -> Bytes {
        let certificate =
            params.signed_by(key, &Issuer::from_params(&by.0, &by.1)).expect("signed");
        certificate.der().to_vec().into()
    }

    fn ours(by: &(CertificateParams, KeyPair)) -> Bytes {
        let mut params = CertificateParams::default();
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
        signed(&params, &KeyPair::generate().expect("a key"), by)
    }

    /// Whoever has the executor's own key, and not that of its authority, can answer what it likes.
    #[test]
    fn an_authority_is_believed_only_if_the_one_before_it_vouches_for_it() {
        let [former, next, strange] = [(); 3].map(|()| authority());
        let self_signed = |one: &(CertificateParams, KeyPair)| signed(&one.0, &one.1, one);
        let vouched = signed(&next.0, &next.1, &former);
        let (known, foreign) = (self_signed(&former), self_signed(&strange));
        let answer = |authority: &Bytes, next_authority: &Bytes, certificate: Bytes| {
            let [authority, next_authority] = [authority, next_authority].map(Bytes::clone);
            let issued = IssuedCertificate {
                authority,
                next_authority,
                certificate,
                ..IssuedCertificate::default()
            };
            with_authority_after(&known, issued).map(|issued| issued.authority).ok()
        };
        let none = Bytes::new();
        assert_eq!(answer(&known, &none, ours(&former)), Some(known.clone()));
        assert_eq!(answer(&known, &vouched, ours(&next)), Some(vouched.clone()));
        // After the end of the rotation.
        assert_eq!(answer(&vouched, &none, ours(&next)), Some(vouched.clone()));
        for certificate in [ours(&former), ours(&next), ours(&strange)] {
            assert_eq!(answer(&known, &foreign, certificate.clone()), None);
            assert_eq!(answer(&foreign, &none, certificate), None);
        }
        for certificate in [ours(&former), ours(&strange)] {
            assert_eq!(answer(&known, &vouched, certificate), None);
        }
        // And not back.
        let issued = IssuedCertificate {
            authority: known.clone(),
            certificate: ours(&former),
            ..Default::default()
        };
        assert!(with_authority_after(&vouched, issued).is_err());
    }
}
